#!/usr/bin/env bash
# Run on a Slurm cluster: `ray symmetric-run` starts Ray in one task on each node, and the first node trains.
#
#   source .venv/bin/activate   # an environment that all nodes see; sbatch passes it on
#   sbatch --nodes=1 --gpus-per-node=4 jobs/slurm.sh --example deepmath-qwen2.5-0.5b run.storage_path=/shared/runs
#
# The arguments are those of `grpo-ray train`. run.storage_path must be a path that all nodes see.
#
# Slurm's signal before the time limit, or before a preemption (with PreemptParameters=send_user_signal), goes to this
# script alone. The driver then finishes and saves its step, the script puts the job back into the queue, and its next
# start continues the run. After the loss of a node Slurm does the same from the last checkpoint.
#
#   scancel --batch --signal=USR1 JOB     save the step, and requeue
#   scancel --batch --signal=TERM JOB     save the step, and end
#
# Everyone who has Ray's token can run code on these nodes as you. It is a file that you alone can read, and Ray's
# dashboard listens on the loopback interface.
#SBATCH --job-name=grpo-ray
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
set -euo pipefail

for program in ray grpo-ray; do
    if ! command -v "$program" >/dev/null; then
        echo "slurm.sh: $program is not on PATH; activate the environment of grpo_ray, then run sbatch again" >&2
        exit 2
    fi
done

# --- Slurm's signal comes at once if the job may not run longer than that: it would be requeued without end ---
limit=$((${SLURM_JOB_END_TIME:-0} - ${SLURM_JOB_START_TIME:-0})) # older releases of Slurm do not set these
if [[ $limit -gt 0 && $limit -le 600 ]]; then
    echo "slurm.sh: warning: the time limit is $limit s, and by default the signal to save comes 600 s before its end:" \
        "set a longer --time, or --signal=B:USR1@SECONDS" >&2
fi

# --- Token: one file for all nodes. Ray creates it readable by everyone. ---
export RAY_AUTH_MODE=token
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [[ ! -s $token ]]; then
    (umask 077 && ray get-auth-token --generate >/dev/null)
fi
chmod 600 "$token"

unset RAY_ADDRESS # sbatch passes it on, but this job has a cluster of its own

# --- Address of the first node, where this script runs too ---
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Its name may stand for a loopback address on the node itself, and Ray needs one that the others reach.
address=${GRPO_RAY_HEAD_ADDRESS:-$(getent ahostsv4 "${nodes[0]}" | awk '$1 !~ /^127\./ {print $1; exit}' || true)}
address=${address:-$(hostname -I | awk '{print $1}')}:$((20000 + SLURM_JOB_ID % 10000))

# --- A requeued job continues its run, even if it was submitted to start over or to go back ---
arguments=("$@")
if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then
    for argument in "$@"; do
        if [[ $argument == run.resume=* || $argument == stages.*.run.resume=* ]]; then
            arguments+=("${argument%%=*}=latest") # of two overrides of a field the last one wins
        fi
    done
fi

# --- One task on each node ---
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
step='' signal='' is_told=''

# Send a signal of Slurm to the driver, which saves its step. Ray's processes must not get it: they would end at once.
forward() {
    interrupted=1
    if [[ $1 == USR1 && -n $is_told ]]; then # a second signal would end the driver before it has saved
        echo "slurm.sh: USR1 again: the driver is already told"
    elif signal=$1 && [[ -s $scratch/driver ]]; then
        is_told=1
        echo "slurm.sh: $signal: the driver finishes and saves its step"
        kill -TERM "$(<"$scratch/driver")" || true
    elif [[ -n $step ]]; then
        kill -TERM "$step" || true # nothing to save yet
    fi
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-600} # imports from shared disks
cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
# shellcheck disable=SC2016  # expanded by the driver's shell
driver='echo $$ >"$1" && export RAY_ADDRESS=$2 && shift 2 && exec grpo-ray train "$@"'
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$cpus" --kill-on-bad-exit=1 \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$cpus" --dashboard-host=127.0.0.1 --disable-usage-stats -- \
    bash -c "$driver" driver "$scratch/driver" "$address" "${arguments[@]}" &
step=$!

# A signal interrupts `wait`, so wait again until the step has ended.
while
    interrupted='' status=0
    wait "$step" || status=$?
    [[ -n $interrupted ]]
do :; done

if [[ $status -eq 0 && ! -s $scratch/driver ]]; then
    echo "slurm.sh: nothing was trained: Ray did not start, for the reason above" >&2
    status=1
fi
if [[ $signal == USR1 && $status -ne 0 ]]; then
    echo "slurm.sh: job $SLURM_JOB_ID goes back into the queue, and continues the run"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
