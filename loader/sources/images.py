"""Images as arrays, decoded with Pillow."""

import io
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loader.sources.extras import needed

#: Pillow's modes that images are converted to, and their numbers of channels.
CHANNELS_OF_MODES: Final = {"L": 1, "RGB": 3, "RGBA": 4}
_MODES: Final = {channels: mode for mode, channels in CHANNELS_OF_MODES.items()}
#: Pillow's modes of up to 8 bits a channel, and the number of channels that keeps all they hold.
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

#: Pillow's modes of grey images of 16 bits; which one depends on its version and the file's byte order.
_GREY_16: Final = {"I", "I;16", "I;16L", "I;16B", "I;16N"}

_BITS_PER_SAMPLE: Final = 258  # TIFF's tag
_PNG_DEPTH: Final = re.compile(rb"\x89PNG\r\n\x1a\n.{4}IHDR.{8}(.)", re.DOTALL)
_HOLDING_PNG: Final = {"PNG", "ICO", "CUR", "ICNS"}
#: The codestream's SIZ marker, up to the number of components; 3 bytes follow for each.
_SIZ: Final = re.compile(rb"\xff\x4f\xff\x51.{36}..", re.DOTALL)
_HOLDING_JPEG_2000: Final = {"JPEG2000", "ICNS"}
#: The maximum value of a PGM or PPM header, after its width and height.
_PPM_DEPTH: Final = re.compile(
    rb"P(?:[2356]|0CMYK|y\w+)(?:(?:\s|#[^\r\n]*[\r\n])+\d+){2}(?:\s|#[^\r\n]*[\r\n])+(\d+)"
)
_BC6H: Final = {94, 95, 96}  # DXGI formats of 16-bit floats
_AV1C: Final = re.compile(rb"av1C\x81.(.)", re.DOTALL)
_AV1C_HIGH_BITS: Final = 0x40


def decode_image(
    data: bytes, shape: Sequence[int | None] | None = None
) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """Decode an image to its pixels: ``uint8[height, width, channels]``, or ``uint16[height, width, 1]``.

    Give it to a source, as it is or with a shape::

        decode={"image": functools.partial(loader.decode_image, shape=(28, 28, 1))}

    Pixels stay as they are stored: the camera's orientation is not applied. Of several pictures in a file,
    such as an animation, the first is decoded. Grey images of 16 bits become uint16. Other images of more
    than 8 bits a channel are refused, since Pillow would cut them to 8. The pixels of a JPEG may differ in
    the last bit from one version of Pillow to another.

    Args:
      data: a file of any format that Pillow reads: PNG, JPEG, WebP, and more.
      shape: height, width and channels, each ``None`` if any will do. An image is converted to the
        channels, 1 (grey), 3 (RGB) or 4 (RGBA), and never resized. By default an image keeps its own.

    Raises:
      ModuleNotFoundError: Pillow is not installed.
      TypeError, ValueError: the bytes are no image, or a damaged or cut one; it has more than 8 bits a
        channel and is not grey of 16, or has another height or width; or the shape is none. Describes the
        bytes.
    """
    module = needed("PIL.Image", "images")
    height, width, channels = _checked_shape(shape)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"an image is decoded from bytes, not from {type(data).__name__}")
    try:
        with module.open(io.BytesIO(data)) as image:
            _check_size(image, module.MAX_IMAGE_PIXELS)
            found = _pixels(image, channels, bytes(data))
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


def _pixels(
    image: Any, channels: int | None, data: bytes
) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    bits = _bits(image, data)
    transparent = "transparency" in image.info
    if bits == 16 and image.mode in _GREY_16 and not transparent:
        if channels not in (None, 1):
            raise ValueError(
                f"it is grey of 16 bits, which is not converted to {channels} channels"
            )
        return np.array(image).astype(np.uint16)[..., np.newaxis]
    if bits > 8 or image.mode not in _CHANNELS:
        raise ValueError(
            f"it has {bits} bits a channel in mode {image.mode}, and Pillow would cut them to 8. Only "
            "grey of 16 bits and images of up to 8 bits a channel are decoded here: decode others by a "
            "function of your own, with another library"
        )
    mode = _MODES[channels or (4 if transparent else _CHANNELS[image.mode])]
    pixels = np.array(image if image.mode == mode else image.convert(mode), np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1)


def _bits(image: Any, data: bytes) -> int:
    """The bits of a channel as the file states them, the most of all channels.

    Pillow opens many images of more than 8 bits a channel in a mode of 8.
    """
    match image.format:
        case "TIFF":
            return int(max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,))))
        case "PPM":
            if data[:2] in (b"P1", b"P4"):
                return 1
            found = _PPM_DEPTH.match(data)
            most = int(found[1]) if found else 0
            # Pillow stretches values up to any other maximum to 16 bits.
            return 16 if most in (0, 65535) else min(most.bit_length(), 15)
        case "SGI":
            return 8 * data[3]
        case "DDS":
            return 16 if data[84:88] == b"DX10" and data[128] in _BC6H else 8
        case "AVIF":
            return max(
                (10 for flags in _AV1C.findall(data) if flags[0] & _AV1C_HIGH_BITS), default=8
            )
    # PNG and JPEG 2000, alone or inside an icon.
    depths = (
        [depth[0] for depth in _PNG_DEPTH.findall(data)] if image.format in _HOLDING_PNG else []
    )
    if image.format in _HOLDING_JPEG_2000:
        for start in _SIZ.finditer(data):
            components = int.from_bytes(data[start.end() - 2 : start.end()], "big")
            depths += [size + 1 for size in data[start.end() :][: 3 * components : 3]]
    return max(depths, default=8)


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
