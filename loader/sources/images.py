"""Images as arrays, decoded with Pillow."""

import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.sources.extras import needed

_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
#: What images come as, and how many channels they then have; anything else would lose something.
_CHANNELS: Final = {
    "1": 1,
    "L": 1,
    "LA": 4,
    "P": 3,
    "PA": 4,
    "RGB": 3,
    "RGBA": 4,
    "CMYK": 3,
    "YCbCr": 3,
}


def decode_image(data: bytes, shape: Sequence[int | None] | None = None) -> npt.NDArray[np.uint8]:
    """An image's pixels: ``uint8[height, width, channels]``.

    To be given to a source, as it is or with a shape::

        decode={"image": functools.partial(loader.decode_image, shape=(28, 28, 1))}

    Pixels stand as they are stored: a camera's remark on how to turn the picture is left alone. Of several
    pictures in a file, such as those of an animation, it is the first. What a JPEG decodes to may differ in the last bit from one version of Pillow to another.

    Args:
      data: a file of any format that Pillow reads: PNG, JPEG, WebP, and more.
      shape: height, width and channels, each ``None`` where it may be any. An image is converted to
        the channels, which are 1 (grey), 3 (RGB) or 4 (RGBA), and never resized. By default the image's
        own: grey, RGB or RGBA.

    Raises:
      ModuleNotFoundError: Pillow is not there.
      TypeError, ValueError: the bytes are no image, or a damaged or cut one; it has more than 8 bits a
        channel, or another height or width; or the shape is none. Says what the bytes are.
    """
    module = needed("PIL.Image", "images")
    height, width, channels = _checked_shape(shape)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"an image is decoded from bytes, not from {type(data).__name__}")
    try:
        with module.open(io.BytesIO(data)) as image:
            _check_size(image, module.MAX_IMAGE_PIXELS)
            found = _pixels(image, channels)
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        module.DecompressionBombError,
        Warning,
    ) as error:
        raise ValueError(f"{_described(data)} cannot be decoded as an image: {error}") from error
    if found.shape[0] != (height or found.shape[0]) or found.shape[1] != (width or found.shape[1]):
        raise ValueError(
            f"the image has height {found.shape[0]} and width {found.shape[1]}, and shape asks for "
            f"{height or 'any'} and {width or 'any'}; images are not resized here: do that with a function "
            "of yours that calls decode_image"
        )
    return found


def _check_size(image: Any, most: int | None) -> None:
    """Raises where Pillow only warns: filters of warnings are of all threads, and cannot be set here."""
    if most is not None and image.width * image.height > most:
        raise ValueError(
            f"it has {image.width * image.height} pixels, and PIL.Image.MAX_IMAGE_PIXELS allows {most}"
        )


def _pixels(image: Any, channels: int | None) -> npt.NDArray[np.uint8]:
    if image.mode not in _CHANNELS:
        raise ValueError(
            f"its pixels are of mode {image.mode}, and only those of 8 bits a channel are decoded"
        )
    own = 4 if "transparency" in image.info else _CHANNELS[image.mode]
    mode = _MODES[channels or own]
    pixels = np.array(image if image.mode == mode else image.convert(mode), np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1)


def _checked_shape(shape: Sequence[int | None] | None) -> tuple[int | None, int | None, int | None]:
    if shape is None:
        return None, None, None
    try:
        height, width, channels = shape
    except (TypeError, ValueError):
        raise ValueError(f"shape must be height, width and channels, not {shape!r:.80}") from None
    if channels is not None and channels not in _MODES:
        raise ValueError(f"an image has 1, 3 or 4 channels, not {channels!r:.80}")
    return height, width, channels


def _described(data: bytes | bytearray | memoryview) -> str:
    start = bytes(data[:16])
    return f"{len(data)} bytes that begin with {start!r}" if start else "an empty value"
