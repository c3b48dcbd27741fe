# Sourced by the other scripts: makes the virtual environment .venv with the package and the given extras, or makes it
# again when it is stale (another Python, another folder, or other requirements than it was made from).
#
#   ensure_venv "[dev]"

ensure_venv() {
    local extras="$1" python="${PYTHON:-python3}" stamp
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
        echo "Python 3.10 or newer is needed ('$python' is not); name one: PYTHON=/path/to/python3 $0" >&2
        return 2
    }
    stamp="$("$python" -c 'import sys; print(sys.version)'; pwd; cat setup.cfg pyproject.toml)"
    # An environment with more extras than asked for is as good.
    if [ -x .venv/bin/detector ] && [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ] &&
        { [ -z "$extras" ] || [ "$(cat .venv/extras)" = "$extras" ]; }; then
        return 0
    fi
    echo "Making the virtual environment .venv: PyTorch is large, this can take some minutes ..."
    rm -rf .venv
    "$python" -m venv .venv || {
        echo "Could not make it. On Debian and Ubuntu: apt-get install python3-venv" >&2
        return 2
    }
    .venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --editable ".$extras" || return 2
    .venv/bin/python -m compileall -q -j 0 .venv/lib* > /dev/null || true # as pip does, but by all cores
    .venv/bin/python -c 'import cv2' || {
        echo "OpenCV misses a system library. On Debian and Ubuntu: apt-get install libgl1 libglib2.0-0" >&2
        return 2
    }
    echo "$extras" > .venv/extras
    echo "$stamp" > .venv/stamp
}
