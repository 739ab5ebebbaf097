package main

import (
	"io"
	"log/slog"
	"os"
	"slices"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/config"
)

// Flags and the environment still override the file after a reload. A generated node name is not a change.
func TestReloadAppliesTheLevelAlone(t *testing.T) {
	t.Parallel()
	path := writeConfig(t, "retention: 24h\n")
	p := &program{errOut: io.Discard, env: append(slices.Clone(minimalEnv), "OUTRELAY_STATE_DATABASE=state"), configFile: path}
	running, log, err := p.loadWithLogger()
	if err != nil {
		t.Fatal(err)
	}

	var applied, waiting []string
	l := &reloader{program: p, running: running, onReload: func(a, w []string, e error) { applied, waiting, err = a, w, e }}
	again := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		l.reload()
	}

	again("retention: 24h\n")
	if len(applied)+len(waiting) != 0 || err != nil {
		t.Errorf("unchanged: %v %v %v", applied, waiting, err)
	}

	again("retention: 48h\nlog: {level: debug}\nstate: {database: other}\n")
	if !slices.Equal(applied, []string{"log.level=debug"}) || !slices.Equal(waiting, []string{"retention"}) || err != nil || !log.Enabled(t.Context(), slog.LevelDebug) {
		t.Errorf("%v %v %v", applied, waiting, err)
	}

	again("retention: never\nlog: {level: error}\n")
	if err == nil || !log.Enabled(t.Context(), slog.LevelDebug) {
		t.Errorf("a mistake: %v", err)
	}

	again("retention: 24h\n")
	if !slices.Equal(applied, []string{"log.level=info"}) || len(waiting) != 0 || err != nil || log.Enabled(t.Context(), slog.LevelDebug) {
		t.Errorf("back: %v %v %v", applied, waiting, err)
	}
	// Tokens apply at once, and so do not wait.
	l.running.HTTP.Admin = &config.Admin{}
	l.apply = func(config.Config) []string { return []string{"http.admin.token"} }
	again("retention: 24h\nhttp: {admin: {token: new-token-of-the-test}}\n")
	if slices.Contains(waiting, "http.admin.token") || !slices.Contains(applied, "http.admin.token") || err != nil {
		t.Errorf("a token: %v %v %v", applied, waiting, err)
	}
	if config.Default().Log.Level != "info" {
		t.Error("the default is another one")
	}
}
