"""Image processors that a checkpoint may bring: read as the library reads them, and equal to it in every pixel."""

import json

import numpy as np
import pytest
from library_versions import skip_where_torch_rounds_otherwise
from PIL import Image
from test_resample import noise, skip_without

from embedder.media.images import resize_image, to_rgb
from embedder.media.resize import ResizeSpec
from shards.convert.preprocessing import export_processor, import_processor
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig

torch = pytest.importorskip("torch")

SIZES = [(149, 90), (90, 149), (500, 31), (31, 499), (224, 224), (256, 256), (17, 11), (301, 300), (1300, 301)]
SQUARE = {"height": 224, "width": 224}
# Content of preprocessor_config.json, as published checkpoints have it; what it is read as.
PROCESSORS = {
    "CLIP of old": (
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224, "do_center_crop": True},
        ("crop", None, "bicubic"),
    ),
    "CLIP's defaults": ({"image_processor_type": "CLIPImageProcessor"}, ("crop", None, "bicubic")),
    "ViT of old": ({"feature_extractor_type": "ViTFeatureExtractor", "size": 224}, ("squash", None, "bilinear")),
    "DINOv2": (
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}, "crop_size": SQUARE},
        ("crop", 256, "bicubic"),
    ),
    "DeiT of old": (
        {"feature_extractor_type": "DeiTFeatureExtractor", "size": 256, "crop_size": 224, "resample": 3},
        ("squash", 256, "bicubic"),
    ),
    "DeiT's defaults": ({"image_processor_type": "DeiTImageProcessorFast"}, ("squash", 256, "bicubic")),
    "odd surplus": (
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 255}, "resample": 1},
        ("crop", 255, "lanczos"),
    ),
    "SigLIP": ({"image_processor_type": "SiglipImageProcessor", "size": SQUARE}, ("squash", None, "bicubic")),
}


def write(folder, settings):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def spec_of(preprocess):
    names = ("image_size", "interpolation", "reduced_decode", "resampler", "resize_size")
    return ResizeSpec(mode=preprocess.resize, **{name: getattr(preprocess, name) for name in names})


def pixels(image, preprocess):
    side = preprocess.image_size
    return np.frombuffer(resize_image(image, spec_of(preprocess)).data, np.uint8).reshape(side, side, 3)


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_transformers_own_processor(tmp_path, name):
    from transformers import AutoImageProcessor

    settings, expected = PROCESSORS[name]
    found = import_processor(write(tmp_path, settings), 224, 64)
    assert (found.resize, found.resize_size, found.interpolation) == expected
    theirs = AutoImageProcessor.from_pretrained(tmp_path)
    assert (found.mean, found.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    skip_without(found.interpolation)
    skip_where_torch_rounds_otherwise(found.interpolation)
    theirs.do_rescale = theirs.do_normalize = False
    generator = np.random.default_rng(3)
    for size in SIZES:
        image = Image.fromarray(noise(generator, size))
        (planes,) = theirs(image)["pixel_values"]
        assert np.array_equal(pixels(image, found), np.asarray(planes).transpose(1, 2, 0)), size


@pytest.mark.parametrize("settings", [{"size": 224}, {"do_resize": True}])
@pytest.mark.parametrize("model_type", ["clip", "dinov2", "siglip", "vit"])
def test_settings_that_name_no_class_are_those_of_the_models_own(tmp_path, model_type, settings):
    from transformers import AutoImageProcessor

    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoImageProcessor.from_pretrained(write(tmp_path, settings))
    named = write(tmp_path, settings | {"image_processor_type": type(theirs).__name__})
    if (model_type, settings) == ("siglip", {"size": 224}):  # its class makes the shortest edge of a number
        with pytest.raises(ModelError, match="the model takes 224 px"):
            import_processor(write(tmp_path, settings), 224, 64)
    else:
        assert import_processor(named, 224, 64) == import_processor(write(tmp_path, settings), 224, 64)


@pytest.mark.parametrize("size", [(71, 1), (1, 171), (651, 10), (47, 3164), (5813, 90)])
def test_the_middle_of_a_very_long_image_is_that_of_the_libraries(tmp_path, size):
    """Its ends are cut off before the resize, which moves no pixel: at most rounding differs."""
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize
    from transformers import CLIPImageProcessor

    theirs = CLIPImageProcessor()
    theirs.save_pretrained(tmp_path)
    theirs.do_rescale = theirs.do_normalize = False
    found = import_processor(tmp_path, 224, 64)
    skip_without(found.interpolation)
    image = Image.fromarray(noise(np.random.default_rng(7), size))
    (planes,) = theirs(image)["pixel_values"]
    own = np.asarray(planes).transpose(1, 2, 0)
    pillows = np.asarray(Compose([Resize(224, InterpolationMode.BICUBIC), CenterCrop(224)])(image))
    for resampler, expected in (("torchvision", own), ("pillow", pillows)):
        made = pixels(image, found.model_copy(update={"resampler": resampler}))
        assert np.abs(made.astype(int) - expected).max() <= 3, resampler


def test_a_dinov3s_own_processor_differs_by_less_than_one_level(tmp_path):
    """It resizes floats; this project's are rounded to 8 bits, so that only images of the model's size are equal."""
    from transformers import DINOv3ViTImageProcessor

    theirs = DINOv3ViTImageProcessor(do_normalize=False)
    theirs.save_pretrained(tmp_path)
    found = import_processor(tmp_path, 224, 64)
    for size, largest in (((224, 224), 1e-4), ((301, 300), 1.0), ((150, 90), 1.0)):
        image = Image.fromarray(noise(np.random.default_rng(5), size))
        (planes,) = theirs(image)["pixel_values"]
        assert np.abs(pixels(image, found) - 255 * np.asarray(planes).transpose(1, 2, 0)).max() < largest


def test_transparent_images_are_laid_on_white_as_transformers_does(tmp_path):
    from transformers import CLIPImageProcessor

    theirs = CLIPImageProcessor()
    theirs.save_pretrained(tmp_path)
    theirs.do_rescale = theirs.do_normalize = False
    image = Image.fromarray(np.random.default_rng(6).integers(0, 256, (90, 150, 4), dtype=np.uint8))
    (planes,) = theirs(image)["pixel_values"]
    clear = Image.new("RGBA", (224, 224), (0, 0, 0, 0))
    if not np.asarray(theirs(clear)["pixel_values"][0]).all():
        pytest.skip("this transformers shows what transparent pixels hide")
    found = pixels(to_rgb(image), import_processor(tmp_path, 224, 64))
    assert np.array_equal(found, np.asarray(planes).transpose(1, 2, 0))


@pytest.mark.parametrize("name", ["DINOv2", "DeiT of old", "CLIP of old", "ViT of old"])
def test_an_exported_processor_is_read_as_the_same(tmp_path, name):
    preprocess = import_processor(write(tmp_path, PROCESSORS[name][0]), 224, 64)
    assert import_processor(write(tmp_path, export_processor(preprocess)), 224, 64) == preprocess


def test_a_padding_processor_can_not_be_exported():
    with pytest.raises(ModelError, match='preprocess.resize = "pad": transformers has "squash" and "crop" only'):
        export_processor(PreprocessConfig(resize="pad"))


@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.875])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_are_those_of_timms_own_transforms(crop_mode, crop_pct, interpolation, tmp_path):
    from timm.data import create_transform
    from timm.models import create_model

    from shards.convert.timm_vision import read_timm_preprocess

    data = {"input_size": (3, 48, 48), "crop_mode": crop_mode, "crop_pct": crop_pct, "interpolation": interpolation}
    with torch.device("meta"):
        model = create_model("test_vit", pretrained_cfg_overlay=data)
    found = read_timm_preprocess(model, 48, 64, tmp_path)
    assert found.resize_size == {1.0: None, 0.9: 53, 0.875: 54}[crop_pct]
    transform = create_transform(**(data | {"mean": (0, 0, 0), "std": (1, 1, 1)}))
    generator = np.random.default_rng(4)
    for size in SIZES:
        image = Image.fromarray(noise(generator, size))
        expected = (transform(image) * 255).round().byte().numpy().transpose(1, 2, 0)
        assert np.array_equal(pixels(image, found), expected), size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "a ConvNext.* prepares images in its own way"),
        (
            {"image_processor_type": "OwnImageProcessor", "size": 224},
            "transformers has no OwnImageProcessor, so what it",
        ),
        ({"size": {"shortest_edge": 200}, "crop_size": SQUARE, "do_center_crop": True}, "the model takes 224 px"),
        ({"size": {"shortest_edge": 256}, "crop_size": 240, "do_center_crop": True}, "the model takes 224 px"),
        ({"size": {"shortest_edge": 256}, "crop_size": {"height": 9, "width": 8}, "do_center_crop": True}, "= {'short"),
        ({"size": {"longest_edge": 224}}, "size = {'longest_edge': 224}, crop_size = None: expected"),
        ({"size": {"shortest_edge": 224, "longest_edge": 224}}, "the model takes 224 px"),
    ],
)
def test_what_can_not_be_done_is_refused_in_one_line(tmp_path, settings, message):
    write(tmp_path, settings | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    with pytest.raises(ModelError, match=message) as caught:
        import_processor(tmp_path, 224, 64)
    assert "\n" not in str(caught.value)


def test_a_model_of_any_size_takes_its_processors(tmp_path):
    write(tmp_path, PROCESSORS["DINOv2"][0])
    found = import_processor(tmp_path, 518, 64, takes_any_size=True)
    assert (found.image_size, found.resize_size) == (224, 256)
    with pytest.raises(ModelError, match="the model takes 518 px"):
        import_processor(tmp_path, 518, 64)


@pytest.mark.parametrize("changes", [{"resize_size": 100}, {"resize_size": 256, "resize": "pad"}])
def test_a_resize_that_is_no_larger_than_the_crop_is_refused(changes):
    with pytest.raises(ValueError, match="resize_size is .* belongs to squash and crop, and is no smaller"):
        PreprocessConfig(**changes)
