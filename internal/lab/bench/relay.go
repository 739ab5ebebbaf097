package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// setting has the settings that differ between the relays of a benchmark. All others have their defaults.
type setting struct {
	watch string // collection
	topic string
	state string // database
	start string
	node  string
	ttl   time.Duration // 0 keeps the default
	label string        // of the profiles
	page  bool          // also serve the operator's page
	slots int           // 0 keeps the default
}

// relay is a relay process. It ends with this process, also if this process is killed.
type relay struct {
	*devstack.Program
	http  string
	page  string // address of the operator's page, or empty
	words logEnd
}

// logEnd is the end of the log of a process.
type logEnd struct{ program *devstack.Program }

func (l logEnd) String() string { return strings.Join(l.program.LastLines(30), "\n") }

// startRelay starts a relay process. It does not wait until the relay has taken over.
func (b *bench) startRelay(setting setting) (*relay, error) {
	listen, err := devstack.FreeAddress()
	if err != nil {
		return nil, err
	}
	page := ""
	if setting.page {
		if page, err = devstack.FreeAddress(); err != nil {
			return nil, err
		}
	}

	file, err := b.writeConfig(setting, listen, page)
	if err != nil {
		return nil, err
	}

	program, command := b.Program, RelayCommand
	if b.Relay != "" {
		program, command = b.Relay, "run"
	}
	args := []string{command, "--config", file}
	if b.CPUProfile != "" && setting.label != "" {
		args = append(args, "--cpuprofile", b.CPUProfile+"."+setting.label)
	}
	if b.MemProfile != "" && setting.label != "" {
		args = append(args, "--memprofile", b.MemProfile+"."+setting.label)
	}

	b.relays++
	running, err := b.stack.Run(fmt.Sprintf("relay-%d", b.relays), append(b.childEnv(), b.loginEnv()...), program, args...)
	if err != nil {
		return nil, err
	}
	return &relay{Program: running, http: listen, page: page, words: logEnd{running}}, nil
}

// writeConfig writes a configuration file and returns its path. It writes JSON, which is valid YAML.
func (b *bench) writeConfig(setting setting, listen, page string) (string, error) {
	type object = map[string]any
	settings := object{
		"watcher": "bench",
		"mongodb": object{"uri": b.MongoDB},
		"state":   object{"database": setting.state},
		"watch":   []string{b.db + "." + setting.watch},
		"start":   setting.start,
		"kafka":   object{"brokers": b.Kafka},
		"topics":  object{"template": setting.topic},
		"http":    object{"listen": listen},
		"log":     object{"level": "info", "format": "text"},
	}

	b.addLogin(settings["mongodb"].(object), settings["kafka"].(object))
	if page != "" {
		settings["http"] = object{"listen": listen, "admin": object{"listen": page, "anonymous": "viewer"}}
	}
	if setting.node != "" {
		settings["node"] = setting.node
	}
	if setting.slots > 0 {
		settings["slots"] = setting.slots
	}
	if setting.ttl > 0 {
		settings["lease"] = object{"ttl": setting.ttl.String(), "renew": (setting.ttl / 5).String()}
	}

	text, err := json.Marshal(settings)
	if err != nil {
		return "", err
	}
	file := filepath.Join(b.stack.Dir(), strings.ReplaceAll(listen, ":", "_")+".yaml")
	return file, os.WriteFile(file, text, 0o600)
}

func (r *relay) pid() int { return r.PID() }

// checkRunning returns an error if the process has ended.
func (r *relay) checkRunning() error {
	if r.Running() {
		return nil
	}
	return fmt.Errorf("the relay ended (%w); end of its log: %s", exitError(r.Err()), r.words)
}

// exitError returns the error of an ended process. It is never nil.
func exitError(err error) error {
	if err == nil {
		return errors.New("exit code 0")
	}
	return err
}

// sendTerminate requests a graceful end and does not wait for it.
func (r *relay) sendTerminate() { _ = r.Terminate() }

func (r *relay) kill() { _ = r.Kill() }

// stopProcess stops the relay gracefully, or kills it after [stall].
func (r *relay) stopProcess() error {
	r.sendTerminate()
	late := time.AfterFunc(stall, r.kill)
	defer late.Stop()

	// Windows has no SIGTERM, so the relay is killed there.
	if err := r.Err(); err != nil && runtime.GOOS != "windows" {
		return fmt.Errorf("the relay did not stop gracefully: %w; end of its log: %s", err, r.words)
	}
	return nil
}

// readPhase returns the phase that the relay reports: owner, standby, …. It returns "" while the relay does not respond.
func (r *relay) readPhase(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()

	body, err := r.httpGet(ctx, "/readyz")
	if err != nil {
		return ""
	}

	var response struct {
		Phase string `json:"phase"`
	}
	_ = json.Unmarshal(body, &response)
	return response.Phase
}

func (r *relay) httpGet(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.http+path, nil)
	if err != nil {
		return nil, err
	}

	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	return io.ReadAll(res.Body)
}

// counters has the values of /metrics that a drain needs.
type counters struct {
	mallocs, read, gaps, cpu float64
}

func (r *relay) readCounters(ctx context.Context) (counters, error) {
	body, err := r.httpGet(ctx, "/metrics")
	if err != nil {
		return counters{}, fmt.Errorf("reading the relay's metrics: %w", err)
	}
	return parseCounters(body)
}

func parseCounters(body []byte) (counters, error) {
	var counters counters
	lines := bufio.NewScanner(bytes.NewReader(body))
	for lines.Scan() {
		name, text, _ := strings.Cut(lines.Text(), " ")
		value := func() float64 { parsed, _ := strconv.ParseFloat(text, 64); return parsed }

		base, _, _ := strings.Cut(name, "{")
		switch {
		case base == "go_memstats_mallocs_total":
			counters.mallocs = value()
		case base == "process_cpu_seconds_total":
			counters.cpu = value()
		case base == "outrelay_read_total":
			counters.read = value()
		case base == "outrelay_gaps_total":
			_, text, _ = strings.Cut(lines.Text(), "} ")
			counters.gaps += value()
		}
	}
	return counters, lines.Err()
}
