"""NVML's values as the probe tells them: a number, or the word for why there is none. Python 3.6 or newer."""

ERROR_UNSUPPORTED, ERROR_NOT_FOUND, ERROR_LOST = (3, 25), (6, 13), (15, 16)
WORDS = ("absent", "unsupported", "error", "lost", "blank", "stale")


def total(values):
    """The sum of the numbers, or the first word when there is none."""
    numbers = [v for v in values if is_number(v)]
    return sum(numbers) if numbers else values[0]


def is_number(value):
    return value is not None and not isinstance(value, str)


def number_or_none(value):
    return value if is_number(value) else None


def mega(bytes_s):
    """MB/s with as many digits as are worth sending."""
    if bytes_s is None:
        return None
    return int(bytes_s / 1e6) if bytes_s >= 1e8 else round(bytes_s / 1e6, 2)


def rounded(value):
    return value if isinstance(value, str) else round(value, 2)


def word_of(value):
    """NVML's error number as the state of a reading."""
    if value in ERROR_UNSUPPORTED:
        return "unsupported"
    if value in ERROR_LOST:
        return "lost"
    return "absent" if value in ERROR_NOT_FOUND else "error"


def scaled(value, factor):
    return value if isinstance(value, str) else value * factor


def text_of(value):
    """Text from NVML, which is bytes in older modules; None for what was not read."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) and value not in WORDS else None


def field_value(field):
    """A field value's number by its type, or the word for why there is none."""
    code = getattr(field, "nvmlReturn", 1)
    if code:
        return word_of(code)
    kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
    return getattr(field.value, kinds.get(field.valueType, "ullVal"))
