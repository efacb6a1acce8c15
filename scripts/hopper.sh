#!/bin/sh
# Prints the name of this machine's first Hopper GPU (compute capability 9.0) as a file name has it, "nvidia-h200",
# or says that there is none and fails.
name=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>/dev/null | sed -n 's/^9\.0, //p' | head -n 1)
if [ -z "$name" ]; then
  echo "no Hopper GPU here (nvidia-smi lists none of compute capability 9.0)" >&2
  exit 1
fi
printf '%s\n' "$name" | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9.\n-'
