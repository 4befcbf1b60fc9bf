#!/bin/sh
# The demonstration behind `make demo`: CIFAR-10 where it can be had, the digits of scikit-learn otherwise.
set -eu
if "$BIN/convmesh" data fetch cifar10; then
  config=examples/cnn_small_cifar10.yaml
else
  echo "CIFAR-10 can't be fetched here, so the demo trains on the handwritten digits of scikit-learn instead."
  "$BIN/convmesh" data fetch digits
  config=examples/digits.yaml
fi
exec "$BIN/convmesh" train "$config" --engine "$ENGINE" --ranks "$RANKS"
