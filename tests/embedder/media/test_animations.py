"""Animated images cut as videos are: which frames, when, and what happens to broken ones."""

import io

import pytest
from PIL import Image
from quarters import BLUE, GREEN, RED, WHITE, YELLOW, close

from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import STILL_IMAGE, DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder

KINDS = ["GIF", "PNG", "WEBP", "AVIF"]
FIT = ResizeSpec(8)
COLOURS = [RED, GREEN, BLUE, YELLOW]


def animation(kind, colours=COLOURS, duration=500, size=(32, 24), **options):
    frames, file = [Image.new("RGB", size, colour) for colour in colours], io.BytesIO()
    options = {"lossless": True} | options if kind == "WEBP" else options
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=duration, **options)
    return file.getvalue()


def segments(decoder, encoded, segment_s=1.0, frames_per_segment=2, resize=FIT):
    return list(decoder.video(encoded, resize, segment_s=segment_s, frames_per_segment=frames_per_segment))


@pytest.mark.parametrize("kind", KINDS)
def test_each_format_gives_its_frames_at_their_times(decoder, kind):
    first, second = segments(decoder, animation(kind))
    assert [(each.segment, each.start_s, each.end_s) for each in (first, second)] == [(0, 0.0, 1.0), (1, 1.0, 2.0)]
    for segment, colours in ((first, (RED, GREEN)), (second, (BLUE, YELLOW))):
        assert segment.pixels.shape == (2, 8, 8, 3)
        assert all(close(segment.pixels[i, 4, 4], colour, 20) for i, colour in enumerate(colours))


@pytest.mark.parametrize("kind", KINDS)
def test_as_an_image_its_first_frame_counts(decoder, kind):
    assert close(decoder.image(animation(kind), FIT), RED, 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("time_s", "colour"), [(-1, RED), (0.0, RED), (0.6, GREEN), (1.0, BLUE), (99.0, YELLOW)])
def test_the_frame_of_a_moment_is_shown(decoder, kind, time_s, colour):
    assert close(decoder.frame_at(animation(kind), FIT, time_s), colour, 20)


def test_a_short_one_is_sampled_over_its_own_length(decoder):
    (only,) = segments(decoder, animation("GIF", duration=100), segment_s=5.0, frames_per_segment=4)
    assert (only.start_s, only.end_s, len(only.pixels)) == (0.0, pytest.approx(0.4), 4)


def test_from_the_start_each_target_is_the_beginning_of_its_part(decoder):
    encoded = animation("GIF", duration=100)
    (only,) = decoder.video(encoded, FIT, segment_s=5.0, frames_per_segment=2, from_start=True)
    assert len(only.pixels) == 2
    assert all(close(image[0, 0], colour, 8) for image, colour in zip(only.pixels, (RED, BLUE), strict=True))


def test_frames_of_no_duration_are_shown_as_browsers_show_them(decoder):
    assert [each.end_s for each in segments(decoder, animation("GIF", duration=0), segment_s=9)] == [pytest.approx(0.4)]
    assert [each.end_s for each in segments(decoder, animation("GIF", duration=20), segment_s=9)] == [
        pytest.approx(0.08)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_one_frame_is_told_apart(decoder, encode_image, kind):
    with pytest.raises(DecodeError) as caught:
        segments(decoder, encode_image(Image.new("RGB", (9, 9)), kind))
    assert caught.value.error_type == STILL_IMAGE


def test_pages_and_several_pictures_are_no_animation(decoder, encode_image):
    pages = [Image.new("RGB", (9, 9)), Image.new("RGB", (9, 9), "red")]
    for kind in ("TIFF", "MPO"):
        with pytest.raises(DecodeError) as caught:
            segments(decoder, encode_image(pages[0], kind, save_all=True, append_images=pages[1:]))
        assert caught.value.error_type == STILL_IMAGE


def test_an_image_for_other_viewers_is_no_frame(decoder):
    encoded = animation("PNG", [WHITE, RED, GREEN], default_image=True)
    (only,) = segments(decoder, encoded)
    assert [close(only.pixels[i, 4, 4], colour, 0) for i, colour in enumerate((RED, GREEN))] == [True, True]
    assert close(decoder.image(encoded, FIT), WHITE, 0)


def test_what_changes_is_drawn_over_what_was_there(decoder):
    whole = Image.new("RGB", (32, 24), RED)
    changed = whole.copy()
    changed.paste(GREEN, (0, 0, 16, 24))
    file = io.BytesIO()
    whole.save(file, "GIF", save_all=True, append_images=[changed], duration=500)
    (only,) = segments(decoder, file.getvalue())
    assert close(only.pixels[1, 4, 1], GREEN, 2) and close(only.pixels[1, 4, 6], RED, 2)


def test_transparent_frames_are_laid_on_white(decoder):
    frames = [Image.new("RGBA", (16, 16), (*RED, 0)), Image.new("RGBA", (16, 16), (*RED, 255))]
    file = io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], duration=500, lossless=True)
    (only,) = segments(decoder, file.getvalue())
    assert close(only.pixels[0], WHITE, 0) and close(only.pixels[1], RED, 0)


def test_frames_of_patches_are_of_one_size(decoder):
    resize = ResizeSpec(0, "patches", patch_size=8, max_patches=12)
    (only,) = segments(decoder, animation("GIF", [RED, GREEN], size=(64, 48)), resize=resize)
    assert only.pixels.shape == (2, 24, 32, 3)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_whole_segments_of_one_that_was_cut_off_are_kept(decoder, kind):
    rng = [Image.effect_noise((64, 48), 90 + number).convert("RGB") for number in range(8)]
    file = io.BytesIO()
    rng[0].save(file, kind, save_all=True, append_images=rng[1:], duration=500)
    found = []
    with pytest.raises(DecodeError):
        for segment in decoder.video(
            file.getvalue()[: -len(file.getvalue()) // 4], FIT, segment_s=1.0, frames_per_segment=2
        ):
            found.append(segment.segment)
    assert found == ([] if kind == "WEBP" else [0, 1])  # libwebp reads a file as a whole


def test_limits_hold_and_are_named():
    encoded = animation("GIF")
    for limits, error_type, name in (
        (DecodeLimits(max_pixels=300), "TooManyPixels", "max_pixels"),
        (DecodeLimits(max_file_bytes=100), "FileTooLarge", "max_file_bytes"),
    ):
        with SandboxedDecoder(limits) as small, pytest.raises(DecodeError) as caught:
            segments(small, encoded)
        assert caught.value.error_type == error_type and f"`{name}`" in caught.value.message
