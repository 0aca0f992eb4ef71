#!/bin/sh
# Makes the files of this folder by programs that are not ours, from generated pictures: exiftool, ImageMagick,
# libheif, libjxl and FFmpeg. The values that they hold stand in tests/embedder/media/test_medium_values.py.
set -eu
cd "$(dirname "$0")"
convert -size 48x32 gradient:red-blue -strip plain.jpg
tag() {
    exiftool -q -q -overwrite_original -Make=Canon -Model="Canon EOS R5" -LensModel="RF 24-70mm" -FocalLength=35 \
        -ExposureTime=1/250 -FNumber=2.8 -ISO=400 -DateTimeOriginal="2023:07:04 12:34:56" \
        -OffsetTimeOriginal=+02:00 -SubSecTimeOriginal=78 -GPSLatitude=48.137154 -GPSLatitudeRef=N \
        -GPSLongitude=11.576124 -GPSLongitudeRef=E -GPSAltitude=519.5 -Artist="Ann Lee" -Copyright="© Ann" \
        -Software=Test -XMP-photoshop:Credit="Agency" -Orientation#=6 "$@"
}
for kind in png webp tif; do convert plain.jpg "tagged.$kind"; done
cp plain.jpg tagged.jpg
heif-enc -q 50 plain.jpg -o tagged.heic > /dev/null
heif-enc -A -q 50 plain.jpg -o tagged.avif > /dev/null
cjxl --quiet --container=1 tagged.png tagged.jxl
for kind in jpg png webp tif heic jxl; do tag "tagged.$kind"; done
tag -Orientation#=1 tagged.avif
# XMP alone, in the southern and western hemispheres
cp plain.jpg xmp.jpg
exiftool -q -q -overwrite_original -XMP-exif:DateTimeOriginal="2020:01:02 03:04:05-05:00" -XMP-tiff:Make=NIKON \
    -XMP-tiff:Model="Z 6" -XMP-aux:Lens="50 mm" -XMP-exif:GPSLatitude="33.856784 S" \
    -XMP-exif:GPSLongitude="151.215297 W" -XMP-dc:Creator=One -XMP-dc:Creator=Two -XMP-dc:Rights="all kept" \
    -XMP-xmp:CreatorTool="Some Editor" -XMP-exif:ExposureTime=2 -XMP-exif:FNumber=11 xmp.jpg
# IPTC alone, as agencies write it
cp plain.jpg iptc.jpg
exiftool -q -q -overwrite_original -IPTC:DateCreated="2019:05:06" -IPTC:TimeCreated="07:08:09+01:00" \
    -IPTC:By-line="Jürg" -IPTC:Credit="Keystone" -IPTC:CopyrightNotice="Keystone 2019" iptc.jpg
# below the sea, no offset, a date that is none
cp plain.jpg low.jpg
exiftool -q -q -n -overwrite_original -GPSLatitude=31.5 -GPSLatitudeRef=N -GPSLongitude=35.5 -GPSLongitudeRef=E \
    -GPSAltitude=430 -GPSAltitudeRef=1 -ModifyDate="2001:01:01 00:00:00" low.jpg
# ImageMagick's own: pages, frames, depth, transparency, profiles
convert -size 16x16 xc:red xc:lime xc:blue frames.gif
convert -size 16x16 xc:red xc:lime xc:blue pages.tif
convert -size 16x16 gradient:red-blue -define png:bit-depth=16 -define png:color-type=2 deep.png
convert -size 16x16 "gradient:#ff000080-#0000ff80" clear.webp
# FFmpeg's clips: with sound and a place, and turned as phones store portraits
ffmpeg -v error -y -f lavfi -i testsrc=size=64x48:rate=10:duration=1 -f lavfi -i sine=duration=1 -c:v libx264 \
    -crf 40 -c:a aac -b:a 16k -metadata creation_time=2023-07-04T10:34:56Z -metadata location=+48.1371+011.5761/ \
    -shortest clip.mp4
ffmpeg -v error -y -i clip.mp4 -an -metadata:s:v rotate=90 -map_metadata -1 -c copy turned.mov
