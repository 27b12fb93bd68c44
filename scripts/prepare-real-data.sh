#!/usr/bin/env bash
# Prepares real training material from Debian 12 packages (training.md §17): downloads the packages with apt, unpacks
# them without installing, and runs `m3 data make`. Nothing of it belongs into the source tree.
#   scripts/prepare-real-data.sh OUT [text|all] [WORK]
# text (default): pages and glosses, about 110 MB of downloads, a few minutes. all: also captioned pictures and
# clips, about 420 MB. OUT must not hold a data set yet; WORK (default OUT.work) keeps packages for a second run.
set -euo pipefail
if (($# < 1)); then
  sed -n '2,6p' "$0" | sed 's/^# \{0,1\}//'
  exit 2
fi
out=$1 what=${2:-text} work=${3:-$1.work}
m3=${M3:-$(dirname "$0")/../build/cpu/m3}
[[ -x $m3 ]] || { echo "no $m3: build first (scripts/test.sh) or set M3=path" >&2; exit 1; }
case $what in
  text) packages=(python3.11-doc debian-handbook gimp-help-en wordnet-base) ;;
  all) packages=(python3.11-doc debian-handbook gimp-help-en wordnet-base tuxpaint-stamps-default wesnoth-1.16-data) ;;
  *) echo "want text or all, got '$what'" >&2; exit 2 ;;
esac

mkdir -p "$work/debs" "$work/root" "$work/glosses"
for package in "${packages[@]}"; do
  if ! compgen -G "$work/debs/${package}_*.deb" >/dev/null; then
    echo "downloading $package"
    (cd "$work/debs" && apt-get download -qq "$package")
  fi
  if [[ ! -e $work/root/.$package ]]; then
    dpkg-deb -x "$work/debs/${package}_"*.deb "$work/root"
    touch "$work/root/.$package"
  fi
done
share=$work/root/usr/share

# WordNet: "word, word: gloss." from the data files, 40 a page. A line is offset, file, type, the count of words in
# hexadecimal, word and number pairs, links, "| gloss".
if [[ ! -e $work/glosses/.done ]]; then
  for part in noun verb adj adv; do
    awk -v part=$part -v folder="$work/glosses" '
      BEGIN { for (i = 0; i < 256; i++) number[sprintf("%02x", i)] = i }
      /^ / { next }
      {
        gloss = substr($0, index($0, "| ") + 2); sub(/[ ;]+$/, "", gloss)
        words = ""
        for (i = 0; i < number[$4]; i++) {
          word = $(5 + 2 * i); gsub(/_/, " ", word); sub(/\([a-z]+\)$/, "", word)
          words = words (i ? ", " : "") word
        }
        if (count % 40 == 0) { if (file) close(file); file = sprintf("%s/%s-%04d.txt", folder, part, count / 40) }
        print words ": " gloss "." > file
        count++
      }' "$share/wordnet/data.$part"
  done
  touch "$work/glosses/.done"
fi

# The figures of training.md §17, within 5 %: other versions of a package would be another corpus.
expect() {  # name, found, wanted
  local low=$(($3 * 95 / 100)) high=$(($3 * 105 / 100))
  printf '%-34s %8d (expected about %d)\n' "$1" "$2" "$3"
  (($2 >= low && $2 <= high)) || { echo "$1: found $2, expected $3 within 5 %: not the packages of Debian 12?" >&2; exit 1; }
}
expect "GIMP help pages" "$(find "$share/gimp/2.0/help/en" -name '*.html' | wc -l)" 685
expect "Debian handbook pages" "$(find "$share/doc/debian-handbook/html/en-US" -name '*.html' | wc -l)" 127
sources=(
  --html "python-doc=$share/doc/python3.11/html" --licence python-doc=PSF-2.0
  --html "debian-handbook=$share/doc/debian-handbook/html/en-US" --licence "debian-handbook=GPL-2+ or CC-BY-SA-3.0"
  --html "gimp-help=$share/gimp/2.0/help/en" --licence gimp-help=GFDL-1.2+
  --text "wordnet=$work/glosses" --licence wordnet=WordNet-3.0)
if [[ $what == all ]]; then
  expect "Tux Paint PNG stamps" "$(find "$share/tuxpaint/stamps" -name '*.png' | wc -l)" 796
  expect "Wesnoth pictures" "$(find "$share/games/wesnoth/1.16/data/core/images" -name '*.png' | wc -l)" 12230
  sources+=(
    --captions "tuxpaint=$share/tuxpaint/stamps" --licence tuxpaint=GPL-2+
    --sequences "wesnoth=$share/games/wesnoth/1.16/data/core/images/units" --licence wesnoth=GPL-2+)
fi
exec "$m3" data make "$out" "${sources[@]}"
