package logging

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestJSONWhereThereIsNoTerminal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := slog.New(New(&out, slog.LevelInfo, "auto"))
	log.Debug("not shown")
	log.With("watcher", "orders").Info("took over", "epoch", 4, "after", 2*time.Second, "err", errors.New("boom"))
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}

	for key, want := range map[string]any{"level": "INFO", "msg": "took over", "watcher": "orders", "epoch": 4.0, "after": "2s", "err": "boom"} {
		if line[key] != want {
			t.Errorf("%s = %v, want %v", key, line[key], want)
		}
	}
}

func TestTextHasNoColourOffATerminal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	slog.New(New(&out, slog.LevelInfo, Text)).Warn("lease suspended", "since", 3*time.Second)
	if got := out.String(); !strings.Contains(got, "WARN lease suspended since=3s") || strings.Contains(got, "\x1b") {
		t.Errorf("%q", got)
	}

	f, err := os.CreateTemp(t.TempDir(), "log")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if isTerminal(f) || isTerminal(&out) {
		t.Error("a file is no terminal")
	}
}

func TestLevelChangesWhileItRuns(t *testing.T) {
	t.Parallel()
	for _, format := range []Format{Text, JSON} {
		var out bytes.Buffer
		var level slog.LevelVar
		log := slog.New(New(&out, &level, format))
		log.Debug("one")
		level.Set(slog.LevelDebug)
		log.Debug("two")
		if got := out.String(); strings.Contains(got, "one") || !strings.Contains(got, "two") {
			t.Errorf("%s: %q", format, got)
		}
	}
}

type hidden struct{ text string }

func (hidden) LogValue() slog.Value { return slog.StringValue(mask) }

type shown struct{ uri string }

func (s shown) String() string { return s.uri }

func TestSecretsAreMasked(t *testing.T) {
	t.Parallel()
	const planted = "hunter2"
	uri := "mongodb://user:" + planted + "@h1,h2/db"
	for _, format := range []Format{Text, JSON} {
		var out bytes.Buffer
		log := slog.New(New(&out, slog.LevelDebug, format))

		log.Info("m", "uri", uri, "secret", hidden{planted}, "password", planted, "kafka_sasl_password", []byte(planted), "token", fmt.Sprint(planted),
			slog.Group("g", "uri", uri, "password", planted, slog.Group("inner", "api_key", planted)))
		log.With("password", planted).WithGroup("g").Error("m", "err", fmt.Errorf("opening: %w", errors.New("connection to "+uri+" refused")))
		log.Info("m", "url", &url.URL{Scheme: "http", User: url.UserPassword("u", planted), Host: "h"}, "stringer", shown{uri})
		log.Info("m", "err", errors.New("error parsing mongodb://u:pa/ss@"+planted+"@h1/db: x"))

		if got := out.String(); strings.Contains(got, planted) {
			t.Errorf("%s: the secret is in the log: %s", format, got)
		}
		if got := out.String(); !strings.Contains(got, "mongodb://***@h1,h2/db") {
			t.Errorf("%s: the hosts are gone: %s", format, got)
		}
	}
}

func TestAttributesThatAreNoSecretsStay(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	slog.New(New(&out, slog.LevelInfo, JSON)).Info("m", "resume_token", "8263", "token_age", "1s", "fence", 4, "empty", "", "password", "")
	if got := out.String(); !strings.Contains(got, `"resume_token":"8263"`) || !strings.Contains(got, `"token_age":"1s"`) || !strings.Contains(got, `"password":""`) {
		t.Error(got)
	}
}
