#!/bin/sh
# Makes the files of this folder by programs that are not ours, from one generated picture: exiftool, ImageMagick,
# libheif, libjxl and FFmpeg. The captions and keywords that they hold stand in tests/embedder/media/test_picture_texts.py.
set -eu
cd "$(dirname "$0")"
convert -size 16x16 gradient:red-blue -strip -quality 40 plain.jpg
put() { # NAME and what exiftool writes into it
    name=$1; shift
    case $name in *.jpg) cp plain.jpg "$name" ;; *.gif | *.png | *.webp | *.tif) convert plain.jpg "$name" ;; esac
    case $name in *.heic) heif-enc -q 20 plain.jpg -o "$name" ;; *.avif) heif-enc -A -q 20 plain.jpg -o "$name" ;; esac > /dev/null
    case $name in *.jxl) cjxl --quiet --container=1 plain.jpg "$name" ;; esac
    exiftool -q -q -overwrite_original "$@" "$name"
}
# XMP
put description.jpg -XMP-dc:Description="Ein Mädchen am Fluss"
put title.jpg -XMP-dc:Title="The harbour"
put headline.jpg -XMP-photoshop:Headline="Floods in Porto" -XMP-dc:Title="DSC_0042.JPG"
put alt_text.jpg -XMP-iptcCore:AltTextAccessibility="a dog that sleeps" -XMP-dc:Title="Rex"
put languages.jpg -XMP-dc:Description="a bridge" -XMP-dc:Description-de="eine Brücke" \
    -XMP-dc:Description-en-GB="a British bridge" -XMP-dc:Description-fr="un pont"
put subject.jpg -XMP-dc:Subject=sea -XMP-dc:Subject=Sea -XMP-dc:Subject="two boats" -XMP-dc:Subject=été
put entities.jpg -XMP-dc:Description="Salt &amp; pepper &#8211; a table"
put lines.jpg -XMP-dc:Description="first line$(printf '\r\n')second line"
# IPTC
put caption.jpg -IPTC:CodedCharacterSet=UTF8 -IPTC:Caption-Abstract="Žižkov in snow"
put caption_1252.jpg -IPTC:Caption-Abstract="Jürgen’s café"
put caption_first.jpg -IPTC:Caption-Abstract="ascii alone" -IPTC:Headline="of no interest"
put news.jpg -IPTC:Headline="The storm" -IPTC:ObjectName="storm 1"
put object_name.jpg -IPTC:ObjectName="Regatta 2019"
put keywords.jpg -IPTC:Keywords=sailing -IPTC:Keywords="Cowes Week" -IPTC:Keywords=Sailing
put long.jpg -IPTC:CodedCharacterSet=UTF8 -IPTC:ObjectName="x$(printf "ä%.0s" $(seq 40))"
# Exif
put image_description.jpg -EXIF:ImageDescription="a red kite"
put image_description_utf8.jpg -EXIF:ImageDescription="ein Kranich über Rügen"
put image_description_latin.jpg -charset exif=latin -EXIF:ImageDescription="ein Kranich über Rügen"
put comment.jpg -EXIF:UserComment="the first day of school"
put comment_utf16.jpg -EXIF:UserComment="Первый день"
put comment_utf16_le.jpg -ExifByteOrder=II -EXIF:UserComment="Überfahrt nach Föhr"
put comment_utf16_be.jpg -ExifByteOrder=MM -EXIF:UserComment="Überfahrt nach Föhr"
put xp_title.jpg -EXIF:XPTitle="Großmutter"
put xp_comment.jpg -EXIF:XPComment="in the garden" -EXIF:XPTitle="Garden"
put xp_subject.jpg -EXIF:XPSubject="the market"
put xp_keywords.jpg -EXIF:XPKeywords="market;fish;Fish; 魚"
# What cameras write is no caption.
put olympus.jpg -EXIF:ImageDescription="OLYMPUS DIGITAL CAMERA         " -EXIF:UserComment="at the lake"
put sony.jpg -EXIF:ImageDescription="SONY DSC" -XMP-dc:Description="SONY DSC" -IPTC:Caption-Abstract="SONY DSC"
put phone.jpg -EXIF:ImageDescription="cof_soft" -EXIF:UserComment="filter: 0; fileterIntensity: 0.0; filterMask: 0;"
put drone.jpg -EXIF:ImageDescription="DCIM/100MEDIA/DJI_0001.JPG" -EXIF:XPComment="default"
# Several places, each with its own, in every format
all() {
    put "$1" -XMP-dc:Description="of XMP" -XMP-dc:Subject=one -EXIF:ImageDescription="of Exif" -EXIF:XPKeywords="two;one"
}
for kind in jpg png webp tif heic avif jxl gif; do all "all.$kind" 2> /dev/null || exiftool -q -q -overwrite_original -XMP-dc:Description="of XMP" "all.$kind"; done
for kind in jpg tif; do exiftool -q -q -overwrite_original -IPTC:Caption-Abstract="of IPTC" -IPTC:Keywords=three "all.$kind"; done
# Files that another program made of these
convert all.jpg magick.png
convert all.jpg magick.webp
heif-enc -q 20 all.jpg -o libheif.heic > /dev/null
heif-enc -A -q 20 all.jpg -o libheif.avif > /dev/null
cjxl --quiet all.jpg libjxl.jxl
ffmpeg -v error -y -i all.jpg -map_metadata 0 ffmpeg.jpg
# Comments of the format itself are no place of captions.
convert plain.jpg -set comment "written by a program" comment_only.jpg
# Sidecars
exiftool -q -q -o sidecar.xmp -XMP-dc:Description="beside the picture" -XMP-dc:Subject=tree -XMP-dc:Subject=house
exiftool -q -q -api Compact=Shorthand,OneDesc -o shorthand.xmp -XMP-photoshop:Headline="in an attribute" -XMP-xmp:Rating=3
