#!/bin/bash
# qsub, qrsh and qlogin of a site that bills groups: "-g GROUP", which 8.1.9 does not have, becomes "-P GROUP".
# It is accepted only on the command line, before the script or command.
words=()
while (($# > 0)); do
    case $1 in
        -g) words+=(-P "${2-}"); shift 2 || break ;;
        -pe) words+=("$1" "$2" "$3"); shift 3 ;;
        -[acelmMNopqSvw] | -ar | -hold_jid | -now | -pty | -dl | -wd | -tc | -sync | -t) words+=("$1" "$2"); shift 2 ;;
        -*) words+=("$1"); shift ;;
        *) break ;;
    esac
done
exec "/usr/lib/gridengine/${0##*/}" "${words[@]}" "$@"
