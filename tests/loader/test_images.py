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
GREY_16: Final = RNG.integers(0, 1 << 16, (5, 7), np.uint16)


def png_of(pixels: npt.NDArray[Any], color: int) -> bytes:
    """A PNG of the pixels' own bit depth, which Pillow only writes for grey."""
    rows = pixels.astype(pixels.dtype.newbyteorder(">")).reshape(len(pixels), -1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    head = struct.pack(
        ">IIBBBBB", pixels.shape[1], len(pixels), 8 * pixels.itemsize, color, 0, 0, 0
    )
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def tiff_of(pixels: npt.NDArray[Any], order: str, photometric: int) -> bytes:
    """An uncompressed TIFF file of 16 bits a channel, which Pillow only writes for grey."""
    height, width, channels = pixels.shape
    data = pixels.astype(order + "u2").tobytes()
    bits = struct.pack(order + f"{channels}H", *[16] * channels)
    at = 8 + 2 + 9 * 12 + 4
    inline = int.from_bytes(bits.ljust(4, b"\0"), "little" if order == "<" else "big")
    short = [(256, width), (257, height), (259, 1), (262, photometric), (277, channels)]
    entries = [(tag, 3, 1, value << (16 if order == ">" else 0)) for tag, value in short]
    entries.append((258, 3, channels, inline if channels <= 2 else at))
    entries += [(273, 4, 1, at + len(bits)), (278, 4, 1, height), (279, 4, 1, len(data))]
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8)
    table = b"".join(struct.pack(order + "HHII", *entry) for entry in sorted(entries))
    return head + struct.pack(order + "H", 9) + table + bytes(4) + bits + data


def sgi_of(pixels: npt.NDArray[Any]) -> bytes:
    height, width, channels = pixels.shape
    head = struct.pack(">HBBHHHH", 474, 0, 2, 3 if channels > 1 else 2, width, height, channels)
    planes = pixels[::-1].transpose(2, 0, 1).astype(">u2")
    return head.ljust(512, b"\0") + planes.tobytes()


def icon_of(png: bytes) -> bytes:
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 7, 5, 0, 0, 1, 32, len(png), 22) + png


def in_colours(channels: int) -> npt.NDArray[np.uint16]:
    return RNG.integers(0, 1 << 16, (5, 7, channels), np.uint16)


def j2k_of(pixels: npt.NDArray[Any], bits: int) -> bytes:
    """A JPEG 2000 file whose header states more bits than were encoded: only the header is looked at."""
    data = bytearray(file_of(pixels, "JPEG2000", no_jp2=True))
    size = data.index(b"\xff\x51")
    for component in range(data[size + 39]):
        data[size + 40 + 3 * component] = bits - 1
    return bytes(data)


def avif_of_ten_bits() -> bytes:
    """An AVIF file whose header states 10 bits: only the header is looked at."""
    data = bytearray(file_of(RGB, "AVIF"))
    data[data.index(b"av1C") + 6] |= 0x40
    depths = data.index(b"pixi") + 9
    data[depths : depths + 3] = bytes([10] * 3)
    return bytes(data)


LOSSLESS_16: Final[dict[str, bytes]] = {
    "PNG": png_of(GREY_16, 0),
    "PNG of Pillow": file_of(Image.fromarray(GREY_16)),
    "TIFF": file_of(Image.fromarray(GREY_16), "TIFF"),
    "TIFF, packed": file_of(Image.fromarray(GREY_16), "TIFF", compression="tiff_lzw"),
    "TIFF, little-endian": tiff_of(GREY_16[..., np.newaxis], "<", 1),
    "TIFF, big-endian": tiff_of(GREY_16[..., np.newaxis], ">", 1),
    "PGM": b"P5 7 5 65535\n" + GREY_16.astype(">u2").tobytes(),
    "PGM, plain": b"P2 7 5 65535\n" + " ".join(map(str, GREY_16.ravel())).encode(),
    "JPEG 2000": file_of(Image.fromarray(GREY_16), "JPEG2000"),
}


@pytest.mark.parametrize("kind", LOSSLESS_16)
def test_grey_of_sixteen_bits_keeps_all_of_them(kind: str) -> None:
    for shape in (None, (5, 7, 1)):
        found = decode_image(LOSSLESS_16[kind], shape)
        assert found.dtype == np.dtype(np.uint16)
        np.testing.assert_array_equal(found, GREY_16[..., np.newaxis])
    with pytest.raises(ValueError, match="grey of 16 bits, which is not converted to 3 channels"):
        decode_image(LOSSLESS_16[kind], (5, 7, 3))


CUT: Final[dict[str, bytes]] = {
    "PNG, RGB": png_of(in_colours(3), 2),
    "PNG, LA": png_of(in_colours(2), 4),
    "PNG, RGBA": png_of(in_colours(4), 6),
    "icon": icon_of(png_of(in_colours(4), 6)),
    "TIFF, RGB": tiff_of(in_colours(3), "<", 2),
    "TIFF, RGBA, big-endian": tiff_of(in_colours(4), ">", 2),
    "TIFF, CMYK": tiff_of(in_colours(4), "<", 5),
    "PPM": b"P6 7 5 65535\n" + in_colours(3).tobytes(),
    "PPM, of ten bits": b"P6\n# by hand\n7 5 # and\n1023 " + (in_colours(3) % 4).tobytes(),
    "PPM, plain": b"P3 1 1 256\n256 0 1",
    "PGM, of 15.9 bits": b"P5 7 5 65534\n" + GREY_16.astype(">u2").tobytes(),
    "PGM, of ten bits": b"P5 7 5 1023\n" + (GREY_16 % 1024).astype(">u2").tobytes(),
    "SGI, RGB": sgi_of(in_colours(3)),
    "SGI, grey": sgi_of(in_colours(1)),
    "JPEG 2000, RGB": j2k_of(RGB, 16),
    "JPEG 2000, grey of nine bits": j2k_of(GREY, 9),
    "JPEG 2000, grey of twelve bits": j2k_of(GREY, 12),
    "AVIF": avif_of_ten_bits(),
}


@pytest.mark.parametrize("kind", CUT)
def test_an_image_that_would_be_cut_to_eight_bits_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"it has (9|1\d) bits a channel in mode .* cut them to 8"):
        decode_image(CUT[kind])


def test_the_same_files_of_eight_bits_are_decoded() -> None:
    """So that the files above are refused for their bits alone."""
    np.testing.assert_array_equal(decode_image(png_of(RGB, 2)), RGB)
    np.testing.assert_array_equal(decode_image(icon_of(png_of(RGB, 2)))[..., :3], RGB)
    np.testing.assert_array_equal(decode_image(b"P6 #\n7 5\n255\n" + RGB.tobytes()), RGB)
    np.testing.assert_array_equal(decode_image(j2k_of(RGB, 8)), RGB)
    for kind in ("SGI", "AVIF"):
        assert decode_image(file_of(RGB, kind)).shape == RGB.shape


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
    (file_of(np.ones((2, 3), np.float32), "TIFF"), "it has 32 bits a channel in mode F"),
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
    found = decode_image(PNG)
    found[:] = 0
