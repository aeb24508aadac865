"""The session with the service, and the connection that carries it."""
