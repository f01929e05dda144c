"""How bytes become arrays: by functions of the user's, on threads where they take time."""

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.identity.fingerprint import dataset_digest
from loader.reading.threads import Crew, in_order, usable_cores
from loader.sources.columns import Where, check_known, checked
from loader.sources.protocol import Field

#: From the bytes of one value to its array; called by several threads.
Decode = Callable[[bytes], npt.ArrayLike]

#: How long the calling thread decodes alone: to start threads takes some 0.1 ms.
_ALONE_SECONDS: Final = 0.001


def check_threads(threads: int | None) -> int:
    """How many threads decode: ``None`` is one for each usable core.

    Raises:
      TypeError, ValueError: it is no integer from 1 on.
    """
    if threads is None:
        return usable_cores()
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"threads must be an integer or None, not {threads!r:.80}")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    return threads


def each(task: Callable[[int], None], count: int, threads: int) -> None:
    """Does ``task(number)`` for each number below ``count``, on threads if they take time.

    No thread is left: where the first few tasks take a millisecond, threads are started for the rest of
    them, and have ended on return.

    Raises:
      Exception: that of the first number that fails.
    """
    done, end = 0, time.perf_counter() + _ALONE_SECONDS
    while done < count and (threads == 1 or time.perf_counter() < end):
        task(done)
        done += 1

    def rest(number: int, _crew: Crew[None]) -> None:
        task(done + number)

    if done < count:
        in_order(rest, count - done, min(threads, count - done))


def decode_column(
    name: str, decode: Decode, field: Field, values: Sequence[bytes], where: Where, threads: int
) -> npt.NDArray[Any]:
    """Decodes values of one column: the field's dtype[k, *shape].

    Raises:
      ValueError: one cannot be decoded, or is not what the field says; names file and row.
    """
    made = np.empty((len(values), *field.shape), field.dtype)

    def task(place: int) -> None:
        made[place] = checked(
            name,
            field,
            decoded(f"column {name!r}", decode, values[place], where, place),
            where,
            place,
        )

    each(task, len(values), threads)
    return made


def decoded(
    what: str, decode: Callable[[bytes], Any], value: bytes, where: Where, place: int
) -> Any:
    """What ``decode`` makes of some bytes.

    Raises:
      ValueError: it raises; names file and row.
    """
    try:
        return decode(value)
    except Exception as error:
        raise ValueError(
            f"{where(place)}: {what} cannot be decoded by {name_of(decode)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_decoders(decode: Any, wanted: Collection[str] | None = None) -> dict[str, Decode]:
    """Functions that decode, as a caller gives them, by the names of what they decode.

    Raises:
      TypeError, ValueError: one is no function, or for something that is not wanted.
    """
    if decode is None:
        return {}
    if not isinstance(decode, Mapping) or not all(callable(found) for found in decode.values()):
        raise TypeError(
            f"decode must map names to functions of bytes, such as loader.decode_image, not be {decode!r:.80}"
        )
    if wanted is not None:
        check_known("decode", decode, wanted)
    for function in decode.values():
        name_of(function)  # refuses one that could not be recognised at a resume
    return dict(decode)


def name_of(function: Any) -> str:
    """By what a function is known from one run to the next: its name, arguments and ``version``.

    Raises:
      TypeError: a partial's argument cannot be told from others of its kind.
    """
    arguments: list[str] = []
    version = getattr(function, "version", "")
    while isinstance(function, functools.partial):
        arguments += map(_argument, function.args)
        arguments += [f"{name}={_argument(value)}" for name, value in function.keywords.items()]
        function = function.func
        version = version or getattr(function, "version", "")
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    name += f"({', '.join(arguments)})" if arguments else ""
    return f"{name} version {version}" if version else name


def _argument(value: Any) -> str:
    """A text that is the same for equal arguments in every process."""
    if value is None or isinstance(value, bool | int | float | str | bytes | np.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, np.ndarray | np.generic):
        return f"sha256:{dataset_digest(value)[:12]}"
    if callable(value) and hasattr(value, "__qualname__"):
        return name_of(value)
    raise TypeError(
        f"a function that decodes is a partial with the argument {value!r:.60} of type "
        f"{type(value).__name__}, by which it could not be recognised at a resume; use a function of its "
        "own, with a version"
    )
