"""How amounts are written where people read them: bytes, counts and seconds in three digits."""


def bytes_text(count: float) -> str:
    """Bytes as ``12.3 MB``: of 1000 each, as disks and networks are sold."""
    return _scaled(count, " B", (" kB", " MB", " GB", " TB", " PB"))


def count_text(count: float) -> str:
    """A count as ``12.3M``; below 10,000 in full, as a whole number."""
    if abs(count) < 10_000:
        return f"{round(count):,}"
    return _scaled(count, "", ("k", "M", "G", "T", "P"))


def things_text(count: int, thing: str) -> str:
    """A count of things as ``1 file`` or ``12.3M files``."""
    ending = "" if count == 1 else "es" if thing.endswith(("batch", "process")) else "s"
    return f"{count_text(count)} {thing}{ending}"


def seconds_text(seconds: float) -> str:
    """Seconds as ``4 ms``, ``1.3 s``, ``2 min 5 s`` or ``3 h 20 min``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _scaled(count: float, plain: str, prefixed: tuple[str, ...]) -> str:
    if abs(count) < 999.5:
        return f"{count:.0f}{plain}"
    power = 1
    while power < len(prefixed) and abs(count) >= 999.5 * 1000**power:
        power += 1
    scaled = count / 1000**power
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f}{prefixed[power - 1]}"
