// What a view asks beside the event stream: asked when it opens and again every so often while it can be seen.

let asked = [];
let generation = 0;

// Replaces what is asked: [{ path, every, draw, fail, cards }], a path of the jobs or one that begins with a slash; times in milliseconds. Nothing is asked
// twice at a time. The cards around the elements with these ids are empty until the first answer: what they show is of another rank, group or job.
export const ask = (wanted) => {
  generation += 1;
  for (const card of document.querySelectorAll(".card[aria-busy]")) card.removeAttribute("aria-busy");
  for (const card of cardsOf(wanted)) card.setAttribute("aria-busy", "true");
  asked = wanted.map((each) => ({ ...each, due: 0, isBusy: false }));
  look();
};

// Asks what depends on a choice anew, at once.
export const askAgain = (path, replacement) => {
  for (const each of asked) {
    if (each.path !== path) continue;
    each.path = replacement;
    each.due = 0;
  }
  look();
};

// What was not there is not asked again before this: there is more in the job than there was then.
export const askForMissing = () => {
  for (const each of asked) each.isMissing = false;
};

const look = () => {
  if (document.hidden) return;
  for (const each of asked) {
    if (!each.isBusy && !each.isMissing && !each.isPaused?.() && performance.now() >= each.due) fetchOne(each, generation);
  }
};

const cardsOf = (wanted) => wanted.flatMap((each) => each.cards ?? []).map((id) => document.getElementById(id).closest(".card, .tiles"));

const fetchOne = async (each, born) => {
  each.isBusy = true;
  const { path } = each;
  try {
    const answer = await fetch(path.startsWith("/") ? path : `/api/jobs/${path}`);
    const body = await answer.json();
    if (born !== generation || path !== each.path) return;
    for (const card of cardsOf([each])) card.removeAttribute("aria-busy");
    if (answer.ok) each.draw(body);
    else each.fail?.(body.error);
    each.isMissing = answer.status === 404;
  } catch (error) {
    // The service is away, which the event stream shows; what was drawn stays. Anything else is a mistake of ours.
    if (!(error instanceof TypeError && /fetch|network/i.test(error.message)) && !(error instanceof SyntaxError)) throw error;
  } finally {
    each.isBusy = false;
    each.due = path === each.path ? performance.now() + each.every : 0;
  }
};

setInterval(look, 500);
document.addEventListener("visibilitychange", look);
