#!/usr/bin/env bash
# A TPU VM pod, from making it to deleting it. Every command may be given again: what is there is used.
#
#   launch/tpu_pod.sh create  --name=sao --zone=us-east5-a --type=v5p-128 [--version=...] [--spot]
#   launch/tpu_pod.sh install --name=sao --zone=us-east5-a [--commit=HEAD]
#   launch/tpu_pod.sh start   --name=sao --zone=us-east5-a -- launch.train --config=configs/qwen3_30b_a3b.py ...
#   launch/tpu_pod.sh status | tail | stop | delete   --name=sao --zone=us-east5-a
#   launch/tpu_pod.sh fetch   --name=sao --zone=us-east5-a --from=runs/a --to=runs/a
#
#   --project=P   of Google Cloud, instead of gcloud's own
#   --version=V   the runtime of the VMs; follows from the type otherwise
#   --spot        capacity that may be taken away at any time
#   --commit=C    to install and to run; the same on all workers
#   --dry_run     prints the commands of gcloud instead of running them
#
# It needs the gcloud command, logged in, with the TPU API enabled.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_environment.sh"

EXTRAS="tpu,envs,report"
LOG="sao_jax.log"       # in the home of every worker, beside the process id and the exit status
CREATED="READY CREATING STARTING RESTARTING REPAIRING"

usage() {
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
}

# --- The command line.

command="${1:-}"
[[ $# -gt 0 ]] && shift
name="" zone="" project="" type="" version="" spot="" commit="HEAD" source_path="" target_path="" dry_run=""
program=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --name=*) name="${1#*=}" ;;
    --zone=*) zone="${1#*=}" ;;
    --project=*) project="${1#*=}" ;;
    --type=*) type="${1#*=}" ;;
    --version=*) version="${1#*=}" ;;
    --commit=*) commit="${1#*=}" ;;
    --from=*) source_path="${1#*=}" ;;
    --to=*) target_path="${1#*=}" ;;
    --spot) spot="yes" ;;
    --dry_run) dry_run="yes" ;;
    --)
      shift
      program=("$@")
      break
      ;;
    *) fail "unexpected $1.
  remedy: launch/tpu_pod.sh --help lists the options; what is to run follows after --." ;;
  esac
  shift
done

# --- gcloud.

# Runs a command, or prints it as a shell would read it.
run() {
  if [[ -z "$dry_run" ]]; then
    "$@"
    return
  fi
  local word words=()
  for word in "$@"; do
    [[ "$word" =~ ^[A-Za-z0-9_./:=,+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
    words+=("$word")
  done
  echo "${words[*]}"
}

# `gcloud compute tpus tpu-vm VERB ...` where the pod is.
pod() {
  local where=("--zone=$zone")
  [[ -z "$project" ]] || where+=("--project=$project")
  run gcloud compute tpus tpu-vm "$@" "${where[@]}"
}

# Runs a script in the home of the given workers ("all" or a number).
on_workers() {
  pod ssh "$name" "--worker=$1" "--command=$2"
}

# The state of the pod, as gcloud names it; empty when there is none.
state() {
  [[ -z "$dry_run" ]] || return 0
  local told
  if told="$(pod describe "$name" "--format=value(state)" 2>&1)"; then
    printf '%s' "$told"
  elif [[ "$told" != *NOT_FOUND* && "$told" != *"not found"* ]]; then
    fail "gcloud could not tell about $name: $told"
  fi
}

# The runtime that Google recommends for a type.
default_version() {
  case "$type" in
    v4-*) echo "tpu-ubuntu2204-base" ;;
    v5litepod-*) echo "v2-alpha-tpuv5-lite" ;;
    v5p-*) echo "v2-alpha-tpuv5" ;;
    v6e-*) echo "v2-alpha-tpuv6e" ;;
    *) fail "no runtime is known for the type '$type'.
  remedy: --version=..., from: gcloud compute tpus tpu-vm versions list --zone=$zone" ;;
  esac
}

# --- The commands.

create() {
  [[ -n "$type" ]] || fail "--type is missing.
  remedy: --type=v5p-128, or another of: gcloud compute tpus accelerator-types list --zone=$zone"
  local chosen now
  chosen="${version:-$(default_version)}"
  now="$(state)"
  if [[ -n "$now" ]]; then
    [[ " $CREATED " == *" $now "* ]] || fail "$name is there, but $now.
  remedy: launch/tpu_pod.sh delete --name=$name --zone=$zone, and create it again."
    echo "$name is there ($now)."
    return
  fi
  pod create "$name" "--accelerator-type=$type" "--version=$chosen" ${spot:+--spot}
}

install() {
  local folder archive
  [[ -z "$(git -C "$repository" status --porcelain --untracked-files=no)" || "$commit" != HEAD ]] ||
    echo "Note: what is not committed is not installed." >&2
  folder="sao_jax-$(full_commit)"
  archive="$(mktemp -d)/$folder.tar.gz"
  git -C "$repository" archive --format=tar.gz --prefix="$folder/" -o "$archive" "$(full_commit)"
  pod scp "$archive" "$name:$folder.tar.gz" --worker=all
  rm -r "$(dirname "$archive")"
  on_workers all "$(
    cat <<SCRIPT
set -euo pipefail
# A folder that is there is whole: it gets its name last.
if [[ ! -d $folder ]]; then
  rm -rf unpacking && mkdir unpacking
  tar -xzf $folder.tar.gz -C unpacking
  mv unpacking/$folder $folder
fi
rm -rf $folder.tar.gz unpacking
cd $folder
# The runtimes of TPU VMs bring Python 3.10; uv fetches a newer one.
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' && [[ ! -x .venv/bin/python ]]; then
  command -v uv >/dev/null || export PATH="\$HOME/.local/bin:\$PATH"
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  uv venv --quiet --python 3.12 .venv
fi
source launch/_environment.sh
use_environment $EXTRAS
SCRIPT
  )"
}

start() {
  [[ ${#program[@]} -gt 0 ]] || fail "there is nothing to run.
  remedy: name a program and its flags after --, as in: start ... -- launch.train --config=configs/calculator.py ..."
  local folder quoted
  folder="sao_jax-$(full_commit)"
  quoted="$(printf '%q ' "${program[@]}")"
  on_workers all "$(
    cat <<SCRIPT
set -euo pipefail
[[ -d $folder ]] || { echo "error: $folder is not installed: launch/tpu_pod.sh install" >&2; exit 1; }
if [[ -e sao_jax.pid ]] && kill -0 "\$(cat sao_jax.pid)" 2>/dev/null; then
  echo "\$(hostname): already running, process \$(cat sao_jax.pid)"
  exit 0
fi
rm -f sao_jax.status
cd $folder
source launch/_environment.sh
use_environment $EXTRAS
# In a session of its own it outlives this connection; what stops it stops the program only, whose status is kept.
setsid nohup bash -c 'trap : TERM; "\$@"; echo \$? >"\$HOME/sao_jax.status"' run "\$python" -m $quoted\\
  >"\$HOME/$LOG" 2>&1 </dev/null &
echo \$! >"\$HOME/sao_jax.pid"
echo "\$(hostname): started, process \$!"
SCRIPT
  )"
}

status() {
  on_workers all "$(
    cat <<SCRIPT
if [[ -e sao_jax.pid ]] && kill -0 "\$(cat sao_jax.pid)" 2>/dev/null; then
  echo "\$(hostname): running: \$(tail -n 1 $LOG)"
elif [[ -e sao_jax.status ]]; then
  echo "\$(hostname): ended with status \$(cat sao_jax.status): \$(tail -n 1 $LOG)"
else
  echo "\$(hostname): not started"
fi
SCRIPT
  )"
}

tail_log() {
  on_workers 0 "tail -n 100 -F $LOG"
}

# Every process saves the same step, and ends with status 75: `start` goes on from there.
stop() {
  on_workers all "$(
    cat <<SCRIPT
[[ -e sao_jax.pid ]] || exit 0
kill -TERM -- "-\$(cat sao_jax.pid)" 2>/dev/null || exit 0
for _ in \$(seq 600); do
  kill -0 "\$(cat sao_jax.pid)" 2>/dev/null || { echo "\$(hostname): ended with status \$(cat sao_jax.status)"; exit 0; }
  sleep 1
done
echo "\$(hostname): still saving after ten minutes" >&2
exit 1
SCRIPT
  )"
}

fetch() {
  [[ -n "$source_path" && -n "$target_path" ]] || fail "--from or --to is missing.
  remedy: --from=DIR, in the home of worker 0, or gs://BUCKET/DIR; --to=DIR on this machine."
  mkdir -p "$target_path"
  case "$source_path" in
    gs://*) run gcloud storage rsync --recursive "$source_path" "$target_path" ;;
    *) pod scp --recurse "$name:$source_path/." "$target_path" --worker=0 ;;
  esac
}

delete() {
  local now
  now="$(state)"  # on its own, so that a question that failed ends this: the pod may be there, and costs money
  if [[ -z "$dry_run" && -z "$now" ]]; then
    echo "$name is not there."
    return
  fi
  pod delete "$name" --quiet
}

full_commit() {
  git -C "$repository" rev-parse --verify --quiet "$commit^{commit}" || fail "there is no commit '$commit'."
}

case "$command" in
  create | install | start | status | stop | fetch | delete) ;;
  tail) command="tail_log" ;;
  "" | --help | -h)
    usage
    exit 0
    ;;
  *) fail "there is no command '$command'.
  remedy: create, install, start, status, tail, stop, fetch or delete." ;;
esac
[[ -n "$name" ]] || fail "--name is missing.
  remedy: --name=NAME, of the pod."
[[ -n "$zone" ]] || fail "--zone is missing.
  remedy: --zone=ZONE, as in --zone=us-east5-a."
[[ -n "$dry_run" ]] || command -v gcloud >/dev/null || fail "there is no gcloud.
  remedy: install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), or look with --dry_run."
"$command"
