"""Images: pixels as they are stored, converted only as asked, and bytes that are no image are described."""

import io
import struct
import warnings
import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from loader import decode_image

RNG: Final = np.random.default_rng(0)
RGB: Final = RNG.integers(0, 256, (5, 7, 3), np.uint8)
GREY: Final = RNG.integers(0, 256, (5, 7), np.uint8)


def file_of(pixels: Any, kind: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    written = io.BytesIO()
    (image.convert(mode) if mode else image).save(written, kind, **options)
    return written.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_pixels_come_back_from_every_lossless_format(kind: str) -> None:
    np.testing.assert_array_equal(decode_image(file_of(RGB, kind)), RGB)


def test_grey_has_one_channel() -> None:
    found = decode_image(file_of(GREY))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, GREY[..., np.newaxis])


def test_a_photograph_is_near_what_it_was() -> None:
    smooth = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8)[..., np.newaxis] * [
        [[3, 5, 7]]
    ]
    found = decode_image(file_of(smooth.astype(np.uint8), "JPEG", quality=95))
    assert np.abs(found.astype(int) - smooth).max() < 16


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("L", 1), ("LA", 4), ("P", 3), ("RGB", 3), ("RGBA", 4)]
)
def test_an_image_has_the_channels_of_its_mode(mode: str, channels: int) -> None:
    assert decode_image(file_of(RGB, mode=mode)).shape == (5, 7, channels)


def test_transparency_of_a_palette_is_kept() -> None:
    paletted = Image.fromarray(RGB).convert("P")
    found = decode_image(file_of(paletted, transparency=0))
    assert found.shape == (5, 7, 4)
    assert set(np.unique(found[..., 3])) <= {0, 255}


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
def test_an_image_is_converted_to_the_channels_asked_for(mode: str, channels: int) -> None:
    found = decode_image(file_of(RGB, mode=mode), (5, None, channels))
    wanted = Image.fromarray(RGB).convert(mode).convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])
    np.testing.assert_array_equal(found, np.asarray(wanted).reshape(5, 7, channels))


def test_an_image_is_not_resized() -> None:
    with pytest.raises(
        ValueError, match=r"height 5 and width 7, and shape asks for 5 and 8; .*not resized"
    ):
        decode_image(file_of(RGB), (5, 8, 3))
    with pytest.raises(ValueError, match="asks for 4 and any"):
        decode_image(file_of(RGB), (4, None, None))


PNG: Final = file_of(RGB)
SIXTEEN_BITS: Final = file_of(Image.fromarray(np.arange(6, dtype=np.uint16).reshape(2, 3)))


def bomb() -> bytes:
    """A PNG file that says to be of 10**10 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IEND", b"")


BAD_BYTES: Final[list[tuple[bytes, str]]] = [
    (b"", "an empty value cannot be decoded as an image"),
    (b"<html>no image</html>", r"21 bytes that begin with b'<html>no image</' cannot be decoded"),
    (PNG[: len(PNG) // 2], r"bytes that begin with b'\\x89PNG.* cannot be decoded as an image"),
    (PNG[:20], "20 bytes that begin with"),
    (SIXTEEN_BITS, "mode I;16, and only those of 8 bits a channel"),
    (bomb(), "cannot be decoded as an image: Image size"),
]


@pytest.mark.parametrize(("data", "named"), BAD_BYTES, ids=range(len(BAD_BYTES)))
def test_bytes_that_are_no_image_are_described(data: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        decode_image(data)


@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
def test_an_image_that_pillow_warns_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 34)
    with pytest.raises(ValueError, match=r"it has 35 pixels, and .* allows 34"):
        decode_image(PNG)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 35)
    np.testing.assert_array_equal(decode_image(PNG), RGB)


def test_the_filters_of_warnings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of all threads: whoever sets them for a while may leave others with them."""
    opened, before, seen = Image.open, list(warnings.filters), []

    def look(file: Any) -> Any:
        seen.append(list(warnings.filters))
        return opened(file)

    monkeypatch.setattr(Image, "open", look)
    decode_image(PNG)
    assert seen == [before]


def test_of_several_pictures_the_first_is_decoded() -> None:
    more = [Image.fromarray(255 - RGB), Image.fromarray(RGB // 2)]
    data = file_of(RGB, "TIFF", save_all=True, append_images=more)
    np.testing.assert_array_equal(decode_image(data), RGB)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 2), (5, 7, "RGB"), 3, "abcd"])
def test_a_shape_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"shape must be|channels, not"):
        decode_image(PNG, shape)


def test_only_bytes_are_decoded() -> None:
    wrong: Any = "image.png"
    with pytest.raises(TypeError, match="decoded from bytes, not from str"):
        decode_image(wrong)


def test_pixels_may_be_written_to() -> None:
    found: npt.NDArray[np.uint8] = decode_image(PNG)
    found[:] = 0
