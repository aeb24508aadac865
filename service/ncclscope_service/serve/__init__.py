"""Ports, routes, the page and notifications."""
