#!/bin/sh
# Gives a root file system the account the server runs as: HwHiAiUser, uid 1000, gid 1000.
#
#   account.sh [ROOT]     ROOT is the root file system, default /
#
# Ascend device files belong to 1000:1000 on the host, and parts of CANN look the running uid up in /etc/passwd, so
# the number and the entry both matter. Base images differ: some have no uid 1000, some have this very account, some
# give the number to a user of the distribution (Ubuntu 24.04: "ubuntu"). Any other holder of the number is replaced,
# which also ends that user's membership in groups such as sudo. The files are edited directly because useradd
# is missing from small images and refuses a uid that is taken.
set -eu

readonly name=HwHiAiUser id=1000
readonly etc="${1:-}/etc" home="/home/$name"

# complain WORD...: ends the build with a reason.
complain() {
    echo "account.sh: $*" >&2
    exit 1
}

# claim FILE ENTRY: makes ENTRY the only line of FILE whose third field is 1000, unless our name already is.
claim() {
    file=$1 entry=$2
    taken=$(awk -F: -v name="$name" '$1 == name { print $3; exit }' "$file")
    case "$taken" in
        "$id") return ;;
        "") ;;
        *) complain "$file gives $name the number $taken; device files belong to $id" ;;
    esac
    # Read whole before it is written. awk ends every line, so a file without a final newline stays sound.
    kept=$(awk -F: -v id="$id" '$3 != id' "$file")
    printf '%s\n%s\n' "$kept" "$entry" > "$file"
}

claim "$etc/group" "$name:x:$id:"
claim "$etc/passwd" "$name:x:$id:$id:npugrad server:$home:/usr/sbin/nologin"

gid=$(awk -F: -v name="$name" '$1 == name { print $4; exit }' "$etc/passwd")
[ "$gid" = "$id" ] || complain "$etc/passwd gives $name the group $gid; it must be $id"
