// A page that came only in part (the network changed while it was fetched, a proxy gave up) would say "connecting" for ever,
// as one module that is missing stops them all. It is loaded again, until it is whole.
addEventListener(
  "error",
  ({ target }) => {
    if (!(target instanceof HTMLScriptElement || target instanceof HTMLLinkElement)) return;
    const connection = document.getElementById("connection");
    if (connection !== null) connection.textContent = "page incomplete, loading again";
    setTimeout(() => location.reload(), 2000);
  },
  true, // such events do not bubble
);
