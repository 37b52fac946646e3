#!/usr/bin/env bash
# install_mlserver.sh VENV: a real KServe v2 server (MLServer) in a virtual environment of its own, 330 MB, half a minute.
# Then: GPUROUTE_TEST_MLSERVER=VENV pytest tests/grpc/test_real_peers.py
set -euo pipefail
venv=$1
[[ -x $venv/bin/mlserver ]] && exit 0
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q "mlserver==1.7.1"
