#!/usr/bin/env bash
# Writes go.mod and go.sum for other versions: `KUBERNETES=v1.36.3 ./make_modules.sh`.
# Kubernetes takes its own libraries from a folder of its repository; here they are the published
# modules of the same version, v0.X.Y for v1.X.Y.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
kubernetes=${KUBERNETES:?give a version, such as v1.36.3}
libraries=v0.${kubernetes#v1.}
theirs=$(go mod download -json "k8s.io/kubernetes@$kubernetes" | sed -n 's/.*"GoMod": "\(.*\)",/\1/p')
{
  printf 'module kubetest\n\n'
  sed -n 's/^\(go\|godebug\) .*/&\n/p' "$theirs"
  printf 'require k8s.io/kubernetes %s\n\n' "$kubernetes"
  printf 'replace (\n'
  sed -n "s#^\t\(k8s.io/[^ ]*\) => ./staging.*#\t\1 => \1 $libraries#p" "$theirs"
  printf ')\n'
} > go.mod
: > go.sum
GOTOOLCHAIN=local go list -mod=mod -deps . > /dev/null # adds what the servers import
