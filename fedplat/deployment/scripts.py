"""The start scripts of the machines, and the page that tells in which order to use them.

Scripts find everything relative to themselves, so a machine's folder can be copied anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

CONNECTION = "federation"

_HEAD = """\
#!/bin/sh
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
. "$here/settings.env"
export FLWR_HOME="$here/flwr-home" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
# Apps use what is installed on the machine; nothing is fetched for a run.
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
command -v {command} >/dev/null || {{
  echo "{command} is not on the PATH: activate the environment in which fedplat is installed" >&2
  exit 127
}}
"""

SUPERLINK = (
    _HEAD.format(command="flower-superlink")
    + """\
umask 077
# The ServerApp starts here, where no module can hide one of the app's.
cd "$here/work"
exec flower-superlink --host "$BIND" --port "$PORT" \\
  --ssl-ca-certfile "$here/ca.crt" --ssl-certfile "$here/superlink.crt" --ssl-keyfile "$here/superlink.key" \\
  --enable-supernode-auth --database "$here/state.db" --isolation subprocess \\
  --disable-runtime-dependency-installation "$@"
"""
)

SUPERNODE = (
    _HEAD.format(command="flower-supernode")
    + """\
case "$here$NAME" in
*[\\"\\\\]*)
  echo "Flower cannot read a name or a folder with a quotation mark or a backslash in it" >&2
  exit 2
  ;;
esac
umask 077
# Every message starts a ClientApp here, where no module can hide one of the app's.
cd "$here/work"
exec flower-supernode --superlink "$SUPERLINK" --root-certificates "$here/ca.crt" \\
  --auth-supernode-private-key "$here/key" --host 127.0.0.1 --port "$PORT" --isolation subprocess \\
  --node-config "partition-id=$PARTITION num-partitions=$PARTITIONS name=\\"$NAME\\" \\
signing-key=\\"$here/signing.pem\\" $NODE_CONFIG" "$@"
"""
)

FLWR = (
    _HEAD.format(command="flwr")
    + """\
# Flower takes the authority's certificate by its absolute path only, which changes when this folder moves.
if ! grep -qxF "root-certificates = \\"$here/ca.crt\\"" "$FLWR_HOME/config.toml"; then
  printf '[superlink]\\ndefault = "federation"\\n\\n[superlink.federation]\\naddress = "%s"\\n%s\\n' \\
    "$SUPERLINK" "root-certificates = \\"$here/ca.crt\\"" >"$FLWR_HOME/config.toml"
fi
exec flwr "$@"
"""
)

REGISTER = """\
#!/bin/sh
# Registers every SuperNode of supernode-keys/; only these may join. One that is registered stays so.
here=$(cd "$(dirname "$0")" && pwd -P)
failed=0
for key in "$here"/supernode-keys/*.pub; do
  name=$(basename "$key" .pub)
  if answer=$("$here/flwr.sh" supernode register "$key" federation --name "$name" 2>&1); then
    echo "$name: registered"
  else
    case $answer in
    *"already in use"*) echo "$name: registered before" ;;
    *)
      printf '%s: not registered\\n%s\\n' "$name" "$answer" >&2
      failed=1
      ;;
    esac
  fi
done
exit $failed
"""

RUN = """\
#!/bin/sh
# Runs a scenario on the federation: ./run.sh SCENARIO STRATEGY ['KEY=VALUE ...' of the run config]
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
if [ $# -lt 2 ]; then
  echo "usage: $0 SCENARIO STRATEGY ['KEY=VALUE ...'], for example $0 quickstart fed-credit rounds=5" >&2
  exit 2
fi
app=$(python -c 'import pathlib, fedplat; print(pathlib.Path(fedplat.__file__).parent / "flower_app")')
answer=$("$here/flwr.sh" run "$app" federation --format json \\
  --run-config "scenario=\\"$1\\" strategy=\\"$2\\" ${3-}") || true
run=$(printf '%s\\n' "$answer" | sed -n 's/.*"run-id": *"\\{0,1\\}\\([0-9]\\{1,\\}\\).*/\\1/p')
if [ -z "$run" ]; then
  printf '%s\\n' "$answer" >&2
  exit 1
fi
echo "run $run"
"$here/flwr.sh" log "$run" federation --stream
# Flower's commands succeed even if the run did not.
answer=$("$here/flwr.sh" ls federation --run-id "$run" --format json)
case $answer in
*'"finished:completed"'*) echo "run $run is finished" ;;
*)
  printf '%s\\n' "$answer" >&2
  exit 1
  ;;
esac
"""

SERVE = """\
#!/bin/sh
# Starts the edge's own server on the edge's SuperLink, and follows its log; it runs until that is stopped.
# Usage: ./serve.sh ['KEY=VALUE ...' of the run config], such as 'min-nodes=2 data-root="/data"'
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
# The scenario comes with the cloud's messages; paths are seen from superlink/work, where the server runs.
exec "$here/run.sh" - - "tier=\\"edge\\" bridge=\\"../../bridge\\" signing-keys=\\"../signing-keys\\" ${1-}"
"""


def connection_text(address: str, certificate: PurePath) -> bytes:
    """Return Flower's ``config.toml`` with one connection, the default."""
    lines = [
        "[superlink]",
        f'default = "{CONNECTION}"',
        "",
        f"[superlink.{CONNECTION}]",
        f'address = "{address}"',
        f'root-certificates = "{certificate}"',
        "",
    ]
    return "\n".join(lines).encode()


def guide(address: str, names: Sequence[str]) -> str:
    """Return which folder goes to which machine and the commands in their order."""
    nodes = "\n".join(f"    {name}/start.sh" for name in names)
    return f"""\
A federation at {address} with {len(names)} SuperNodes

Each folder goes to its own machine, whole; its files find each other wherever it lies. fedplat must be
installed on every machine, and its environment active.

  superlink/      the machine that is reached as {address}
  supernode-*/    one to each client
  operator/       whoever registers clients and starts runs; it holds no private key
  ca/             nowhere: keep it off all these machines, it is needed only for a new certificate

Private keys: ca/ca.key, superlink/superlink.key, supernode-*/key and supernode-*/signing.pem. They are
readable by their owner only; copy them in a way that keeps it so (scp -rp, rsync -a), then delete them here.

1. On the SuperLink's machine:
    superlink/start.sh

2. Once, on the operator's:
    operator/register.sh

3. On each client:
{nodes}

   After a crash the SuperLink takes a client for online for another minute and refuses it until then, so let
   it try again and again:
    until supernode-0/start.sh; do sleep 20; done

4. On the operator's, to see who is online, to start a run, and to see how it ended:
    operator/flwr.sh supernode ls
    operator/run.sh quickstart fed-credit 'overrides="partition.clients={len(names)} attacks=[]"'
    operator/flwr.sh ls

Flower has no login for operators: whoever reaches {address} can register a client and start a run. Let a
firewall or a private network admit the machines of the federation only.

On every machine, before the first start and when something is refused:
    fedplat deploy check FOLDER
"""


def guide_with_edges(address: str, clients: Sequence[Sequence[str]]) -> str:
    """Return the commands of a federation whose edges have these clients, in their order."""
    nodes = "\n".join(
        f"    edge-{edge}/{name}/start.sh" for edge, names in enumerate(clients) for name in names
    )
    count = sum(map(len, clients))
    return f"""\
A cloud at {address} with {len(clients)} edges, which have {count} SuperNodes

Each edge-N/ is a SuperNode of the cloud's with a federation of its own inside. The folders of its clients,
edge-N/supernode-*, go to their machines; the rest of edge-N/ goes to the edge's machine, except edge-N/ca,
which is kept offline, as ca/ is. fedplat must be installed on every machine, and its environment active.

1. On the cloud's machine, and once on its operator's:
    superlink/start.sh
    operator/register.sh

2. On each edge's machine, side by side; register.sh once:
    edge-0/superlink/start.sh
    edge-0/operator/register.sh
    edge-0/operator/serve.sh
    edge-0/start.sh

3. On each client:
{nodes}

4. On the cloud's operator's, once all are online (operator/flwr.sh supernode ls):
    operator/run.sh SCENARIO STRATEGY 'tier="cloud" overrides="topology.name=edges \
topology.edges={len(clients)} partition.clients={count}"'

The file edge-N/bridge/secret is private to the edge's machine: with it, a program of that machine can speak
for the edge.
"""
