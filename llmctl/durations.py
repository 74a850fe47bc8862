"""Durations as readable text."""


def duration_text(seconds: float) -> str:
    """``12 s``, ``3 min``, ``2 h 5 min``, ``3 d 4 h``: two units at most, never negative."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"


def clock(seconds: float) -> str:
    """``0:01:42``, hours unbounded."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def short_duration(seconds: float) -> str:
    """``45s``, ``3m05s``, ``2h10m``, ``3d04h``: for tables; two units at most, never negative."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02d}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02d}h"
