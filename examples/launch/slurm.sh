#!/usr/bin/env bash
# Two nodes with four processes each: sbatch slurm.sh
# Before, once: gradwire secret > ~/.gradwire-secret && chmod 600 ~/.gradwire-secret
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
set -euo pipefail

export GRADWIRE_SECRET_FILE=$HOME/.gradwire-secret # on the file system that the nodes share
# srun gives every process its rank; gradwire finds the first node in the job's list of nodes.
srun --kill-on-bad-exit=0 python train.py
