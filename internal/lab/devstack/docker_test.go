//go:build unix

package devstack

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// fakeDocker is an engine whose containers are processes of this machine: enough of the command line
// to run a mongod, which gets a new data directory.
const fakeDocker = `#!/bin/sh
cd "$FAKE" || exit 1
op=$1; shift
case $op in
version|image) exit 0 ;;
run)
  while :; do case $1 in
    -d) shift ;;
    --name) name=$2; shift 2 ;;
    --label|-p|-e) shift 2 ;;
    *) break ;;
  esac; done
  [ "$1 $2" = "` + mongoImage + ` mongod" ] || { echo "unexpected: $*" >&2; exit 1; }
  shift 2
  echo "$*" >"$name.args"; mkdir "$name.db" ;;
esac
[ -n "$name" ] || for name; do :; done # the last argument
case $op in
run|start)
  set -- $(cat "$name.args")
  "$MONGOD" "$@" --dbpath "$FAKE/$name.db" --nounixsocket >"$name.out" 2>&1 &
  echo $! >"$name.pid" ;;
kill) kill -s KILL "$(cat "$name.pid")" ;;
stop) kill "$(cat "$name.pid")" ;;
pause) kill -s STOP "$(cat "$name.pid")" ;;
unpause) kill -s CONT "$(cat "$name.pid")" ;;
wait) pid="$(cat "$name.pid")"
  # Process 1 of a container may collect no process, and a zombie accepts signals.
  while kill -0 "$pid"; do case "$(cat "/proc/$pid/stat")" in *") Z "*) break ;; esac; sleep 0.05; done ;;
logs) cat "$name.out" ;;
rm) kill -s KILL "$(cat "$name.pid")"; rm -rf "$name.db" "$name.args"; echo "$name" >>removed ;;
esac 2>/dev/null
exit 0
`

// With nothing but a Docker engine a single member runs in a container, is paused, killed and
// restarted there, and is removed by Stop. A set of three is rejected with its reason.
func TestContainer(t *testing.T) {
	c, err := openCache()
	if err != nil {
		t.Fatal(err)
	}
	mongod, err := findMongod(t.Context(), c, Options{Mongods: 1, Progress: func(Progress) {}})
	if err != nil {
		t.Fatal(err)
	}
	bin, fake := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "docker"), []byte(fakeDocker), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, tool := range []string{"cat", "mkdir", "rm", "sleep"} {
		for _, dir := range []string{"/bin", "/usr/bin"} {
			if err := os.Symlink(filepath.Join(dir, tool), filepath.Join(bin, tool)); err == nil {
				break
			}
		}
	}
	t.Setenv("PATH", bin)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("FAKE", fake)
	t.Setenv("MONGOD", mongod.path)

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var u *UnavailableError
	if _, err := Start(ctx, Options{Mongods: 3}); !errors.As(err, &u) || !slices.Contains(u.Tried, "Docker: supports only single members, not 3") {
		t.Errorf("three members by Docker: %v", err)
	}
	s, err := Start(ctx, Options{Mongods: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	m := s.Mongods()[0]
	if m.PID() != 0 || s.Servers()[0].Origin != "docker mongo:7.0.39" {
		t.Errorf("pid %d, %+v", m.PID(), s.Servers())
	}
	if err := m.Pause(); err != nil {
		t.Error(err)
	}
	if err := m.Resume(); err != nil {
		t.Error(err)
	}
	if err := m.Restart(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Primary(ctx); err != nil {
		t.Error(err)
	}
	s.Stop()
	if removed, err := os.ReadFile(filepath.Join(fake, "removed")); err != nil || len(removed) == 0 {
		t.Errorf("containers removed: %q, %v", removed, err)
	}
}

func TestKafkaEnv(t *testing.T) {
	t.Parallel()
	got := kafkaEnv(map[string]string{"log.dirs": "d", "listener.name.sasl_ssl.scram-sha-256.x": "y"}, "id")
	if got["KAFKA_LOG_DIRS"] != "d" || got["CLUSTER_ID"] != "id" || got["KAFKA_LISTENER_NAME_SASL__SSL_SCRAM___SHA___256_X"] != "y" {
		t.Errorf("got %v", got)
	}
}
