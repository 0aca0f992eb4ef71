"""Pictures of text in three languages: clean pages, and pages as a phone sees them, turned, blurred and noisy."""

from functools import cache
from pathlib import Path

import numpy as np
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFilter, ImageFont

WORDS = {
    "English": "invoice total payment before Monday river bridge ticket window platform museum garden school report "
    "weather market coffee kitchen bicycle letter morning winter number station harbour doctor music theatre",
    "German": "Rechnung Gesamtbetrag Überweisung Straße München Öffnungszeiten Bücherei Größe Schlüssel Frühstück "
    "Geschäft Bahnhof Wohnung Sitzung Vertrag Fahrrad Kirche Müller Prüfung Jäger Apfelkuchen Fenster Tür Schrank",
    "Chinese": "发票 总计 付款 北京 上海 车站 图书馆 学校 医院 天气 市场 咖啡 厨房 自行车 信件 早上 冬天 号码 音乐 "
    "电影 公园 银行 机场 老师 学生 电话 地址 日期",
}
SPACES = {"English": " ", "German": " ", "Chinese": ""}  # between words
CHINESE_FONTS = ("wqy-microhei.ttc", "NotoSansCJK-Regular.ttc", "wqy-zenhei.ttc")
SIZE_PX, LINES = (900, 640), 7
PAPER, INK = (246, 243, 235), (24, 26, 40)


@cache
def find_font(language: str) -> Path | None:
    """Return a font for a language, or None: Chinese ones come with the system."""
    if language != "Chinese":
        return Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
    folders = (Path("/usr/share/fonts"), Path("/System/Library/Fonts"))
    found = (path for folder in folders if folder.is_dir() for path in sorted(folder.rglob("*.tt[cf]")))
    return next((path for path in found if path.name in CHINESE_FONTS), None)


def make_page(language: str, seed: int, *, as_seen: bool = False) -> tuple[Image.Image, list[list[str]]]:
    """Draw a page of some lines of words, with numbers as bills have them; return it and the words of each line."""
    rng = np.random.default_rng([seed, *language.encode()])
    words = WORDS[language].split()
    lines = [
        [*(str(word) for word in rng.choice(words, 3, replace=False)), str(rng.integers(1000, 99999))]
        for _ in range(LINES)
    ]
    page = Image.new("RGB", SIZE_PX, PAPER)
    draw = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        font = ImageFont.truetype(str(find_font(language)), int(rng.integers(20, 34)))
        draw.text((40 + int(rng.integers(0, 60)), 40 + 82 * number), SPACES[language].join(line), fill=INK, font=font)
    return (_as_seen(page, rng) if as_seen else page), lines


def _as_seen(page: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Photograph a page: in perspective, turned a little, out of focus, lit from one side, with a sensor's noise."""
    width, height = page.size
    corners = np.array([(0, 0), (0, height), (width, height), (width, 0)]) + rng.uniform(-28, 28, (4, 2))
    page = page.transform(page.size, Image.Transform.QUAD, tuple(corners.ravel()), Image.Resampling.BICUBIC)
    page = page.rotate(float(rng.uniform(-3, 3)), Image.Resampling.BICUBIC, fillcolor=PAPER)
    x_HWC = np.asarray(page.filter(ImageFilter.GaussianBlur(0.8)), np.float32)
    light_W = np.linspace(1.0, rng.uniform(0.55, 0.8), width, dtype=np.float32)
    noisy_HWC = x_HWC * light_W[None, :, None] + rng.normal(0, 9, x_HWC.shape)
    return Image.fromarray(noisy_HWC.clip(0, 255).astype(np.uint8))
