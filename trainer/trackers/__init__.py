"""Trackers: dashboards that draw a run's numbers while it trains."""
