"""Writes ncclscope's Grafana dashboards, alert rules and provisioning files, with Grafana's own foundation SDK."""
