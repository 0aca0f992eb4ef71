"""Images that are decoded many a message: each as by itself, and a hostile one costs only itself."""

import numpy as np
import pytest
from PIL import Image
from sandbox_checks import FIT, ORANGE, is_orange

from embedder.media import sandbox
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder

PATCHES = ResizeSpec(64, "patches", patch_size=8, max_patches=20)


def test_a_batch_gives_what_each_image_gives(decoder, encode_image, tmp_path, png):
    rng = np.random.default_rng(0)
    sources = [encode_image(Image.fromarray(rng.integers(0, 256, (20 + n, 31, 3), np.uint8)), "PNG") for n in range(70)]
    (tmp_path / "file.png").write_bytes(png)
    requests = [(each, FIT if number % 3 else PATCHES) for number, each in enumerate(sources)]
    requests[40:40] = [(b"", FIT), (tmp_path / "file.png", FIT), (png[:-30], FIT), (b"nothing", PATCHES)]
    found = list(decoder.images(requests))
    assert len(found) == len(requests)
    for decoded, (source, rule) in zip(found, requests, strict=True):
        if isinstance(decoded, DecodeError):
            with pytest.raises(DecodeError) as error:
                decoder.image(source, rule)
            assert (decoded.error_type, decoded.message) == (error.value.error_type, error.value.message)
        else:
            assert np.array_equal(decoded.pixels, decoder.image(source, rule))
    assert [isinstance(each, DecodeError) for each in found[40:44]] == [True, False, True, True]


def test_messages_hold_no_more_than_fits(png):
    small, large = (png, FIT), (bytes(sandbox.MAX_BATCH_BYTES // 3), FIT)
    sizes = [len(batch) for batch in sandbox._batches([small] * 70, 1 << 30)]
    assert sizes == [8] * 8 + [6]
    assert [len(batch) for batch in sandbox._batches([large] * 7, 1 << 30)] == [3, 3, 1]
    assert [len(batch) for batch in sandbox._batches([small, large, small], len(png))] == [1, 1, 1]
    wide = ResizeSpec(2048)
    assert [len(batch) for batch in sandbox._batches([(png, wide)] * 5, 1 << 30)] == [2, 2, 1]


def test_a_decoder_that_was_warmed_up_gives_the_same_pixels(encode_image):
    rule = ResizeSpec(32, "crop", "bicubic", resampler="torchvision")
    image = encode_image(Image.effect_noise((300, 200), 60).convert("RGB"), "PNG")
    with SandboxedDecoder() as cold, SandboxedDecoder() as warm:
        warm.warm_up(rule)
        warm.warm_up(FIT)
        assert np.array_equal(cold.image(image, rule), warm.image(image, rule))


def test_a_batch_ends_an_abandoned_video(make_video, png):
    with SandboxedDecoder() as decoder:
        video = decoder.video(make_video([ORANGE] * 60), FIT, segment_s=1.0, frames_per_segment=1)
        next(video)
        assert all(is_orange(each.pixels) for each in decoder.images([(png, FIT)] * 3))
        with pytest.raises(RuntimeError, match="another file"):
            next(video)


@pytest.mark.medium
def test_answers_come_while_a_batch_goes_on(slow_png, png):
    with SandboxedDecoder() as decoder:
        found = decoder.images([(png, FIT)] * 2 + [(slow_png, FIT)] * 3)
        assert is_orange(next(found).pixels)
        found.close()  # it is busy with the others, and is replaced
        assert is_orange(decoder.image(png, FIT))


TORCHVISION = ResizeSpec(32, "squash", "bicubic", resampler="torchvision")


@pytest.mark.medium
def test_memory_that_pytorchs_library_takes_is_no_images_fault(encode_image):
    """A picture that decodes in a new process does so in an old one, which has the library."""
    pytest.importorskip("torch")
    large = encode_image(Image.new("RGB", (9000, 8000), (250, 120, 10)), "PNG", compress_level=1)
    small = encode_image(Image.new("RGB", (24, 24), (250, 120, 10)), "PNG")
    with SandboxedDecoder(DecodeLimits(memory_bytes=1150 << 20)) as decoder:
        assert (decoder.image(large, TORCHVISION) == (250, 120, 10)).all()
        decoder.warm_up(TORCHVISION)
        for found in decoder.images([(small, TORCHVISION), (large, TORCHVISION), (small, TORCHVISION)]):
            assert (found.pixels == (250, 120, 10)).all()


def test_a_broken_library_of_pytorch_costs_no_image(tmp_path, monkeypatch, encode_image):
    library = tmp_path / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    library.write_bytes(b"\x7fELF" + bytes(100))
    image = encode_image(Image.effect_noise((300, 200), 60).convert("RGB"), "PNG")
    with SandboxedDecoder() as decoder:
        first = decoder.image(image, TORCHVISION)
        decoder.warm_up(TORCHVISION)
        assert np.array_equal(decoder.image(image, TORCHVISION), first)


def test_a_death_while_the_library_loads_is_no_images_fault(png):
    with SandboxedDecoder() as decoder:
        assert is_orange(decoder.image(png, FIT))
        death = sandbox.ChildDiedError('the decoder was ended by SIGBUS: in File "torch_kernel.py", line 1')
        decoder._clean_up(death)
        assert not decoder._may_use_torch
        decoder.warm_up(TORCHVISION)
        assert is_orange(decoder.image(png, FIT))
