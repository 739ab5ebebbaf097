package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

const (
	watcher  = "dev"
	leaseTTL = 2 * time.Second
	renew    = 400 * time.Millisecond

	readyWithin = 60 * time.Second // from the start of a relay until it is ready
	stopWithin  = 15 * time.Second // from SIGTERM to SIGKILL; a drain takes up to 10 s
	lastLines   = 12               // printed from the log of a relay that ended unexpectedly
)

// relay is one process of `outrelay run`.
type relay struct {
	node string
	http string
	prog *devstack.Program

	mu       sync.Mutex
	expected bool // its end is intended
}

// markExpected records that the end of the process is intended.
func (r *relay) markExpected() {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.expected = true
}

func (r *relay) isExpected() bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.expected
}

// relays are the processes of one watcher. A process that ended is not restarted. A new node
// replaces it.
type relays struct {
	stack     *devstack.Stack
	binary    string
	env       []string
	config    string
	settings  []string // of the user, each as path=value
	extraArgs []string // further arguments of the processes
	client    *http.Client
	ended     chan *relay   // every process that ended
	closed    chan struct{} // closed when ended is no longer read
	wg        sync.WaitGroup

	mu         sync.Mutex
	lastNumber int
	live       []*relay
}

// newRelays writes the configuration of the relays into the stack's directory. sections replace
// sections of the default configuration; settings take precedence over both.
func newRelays(
	stack *devstack.Stack, n names, binary string, env, settings []string, sections map[string]any,
) (*relays, error) {
	relays := &relays{
		stack:    stack,
		binary:   binary,
		settings: settings,
		env:      removeSettings(env),
		config:   filepath.Join(stack.Dir(), "outrelay.yaml"),
		client:   &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}},
		ended:    make(chan *relay),
		closed:   make(chan struct{}),
	}

	config := map[string]any{
		"watcher": watcher,
		"mongodb": map[string]any{"uri": stack.MongoURI()},
		"state":   map[string]any{"database": n.state},
		"watch":   []string{n.database + ".outbox"},
		"topics":  map[string]any{"template": n.topicName("{aggregatetype}")},
		"kafka":   map[string]any{"brokers": stack.Brokers()},
		"lease":   map[string]any{"ttl": leaseTTL.String(), "renew": renew.String()},
		"log":     map[string]any{"level": "info", "format": "text"},
	}
	// Scenarios replace whole sections.
	maps.Copy(config, sections)
	text, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("writing the relays' configuration: %w", err)
	}
	if err := os.WriteFile(relays.config, text, 0o600); err != nil {
		return nil, fmt.Errorf("writing the relays' configuration: %w", err)
	}
	return relays, nil
}

// removeSettings removes the user's settings of outrelay from env, so that the demo behaves the
// same everywhere.
func removeSettings(env []string) []string {
	kept := []string{}
	for _, v := range env {
		if !strings.HasPrefix(v, "OUTRELAY_") {
			kept = append(kept, v)
		}
	}
	return kept
}

// startRelay starts one more process.
func (r *relays) startRelay() (*relay, error) {
	addr, err := devstack.FreeAddress()
	if err != nil {
		return nil, err
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	r.lastNumber++
	relay := &relay{node: "a-" + strconv.Itoa(r.lastNumber), http: addr}
	args := []string{"run", "--config", r.config}
	// The full slice expression makes append copy the settings: all relays share them.
	for _, s := range append(r.settings[:len(r.settings):len(r.settings)], "node="+relay.node, "http.listen="+addr, "address="+addr) {
		args = append(args, "--set", s)
	}
	relay.prog, err = r.stack.Run(relay.node, r.env, r.binary, append(args, r.extraArgs...)...)
	if err != nil {
		return nil, err
	}
	r.live = append(r.live, relay)

	r.wg.Go(func() {
		<-relay.prog.Done()
		// The receiver of the end must not find the relay among the live relays.
		r.removeRelay(relay)
		select {
		case r.ended <- relay:
		case <-r.closed:
		}
	})
	return relay, nil
}

func (r *relays) removeRelay(relay *relay) {
	r.mu.Lock()
	defer r.mu.Unlock()

	for i, other := range r.live {
		if other == relay {
			r.live = append(r.live[:i:i], r.live[i+1:]...)
			return
		}
	}
}

// liveRelays returns the running relays.
func (r *relays) liveRelays() []*relay {
	r.mu.Lock()
	defer r.mu.Unlock()

	return append([]*relay(nil), r.live...)
}

// findRelay returns the running relay with this node name, or nil.
func (r *relays) findRelay(node string) *relay {
	for _, x := range r.liveRelays() {
		if x.node == node {
			return x
		}
	}
	return nil
}

// findStandby returns a relay other than the owner that is ready to take over, or nil.
func (r *relays) findStandby(ctx context.Context, owner string) *relay {
	for _, x := range r.liveRelays() {
		if x.node != owner && !x.isExpected() && r.readPhase(ctx, x) == "standby" {
			return x
		}
	}
	return nil
}

// readPhase returns the phase that the process reports, or "" if it is not ready.
func (r *relays) readPhase(ctx context.Context, relay *relay) string {
	var status struct {
		Ready bool   `json:"ready"`
		Phase string `json:"phase"`
	}
	err := r.getPath(ctx, relay, "/readyz", func(body *bufio.Reader) error {
		return json.NewDecoder(body).Decode(&status)
	})
	if err != nil || !status.Ready {
		return ""
	}
	return status.Phase
}

// readCounter returns the value of a counter without labels from the metrics of a process.
func (r *relays) readCounter(ctx context.Context, relay *relay, name string) (value float64, err error) {
	err = r.getPath(ctx, relay, "/metrics", func(body *bufio.Reader) error {
		lines := bufio.NewScanner(body)
		for lines.Scan() {
			if rest, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
				value, err = strconv.ParseFloat(strings.TrimSpace(rest), 64)
				return err
			}
		}
		return errors.Join(lines.Err(), errors.New("no such counter"))
	})
	return value, err
}

// getPath sends a GET request to a process, and calls read with the body of the response.
func (r *relays) getPath(ctx context.Context, relay *relay, path string, read func(*bufio.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+relay.http+path, nil)
	if err != nil {
		return err
	}
	res, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	return read(bufio.NewReader(res.Body))
}

// awaitRelay blocks until done returns true. It returns an error if the process ends, or after
// readyWithin.
func (r *relays) awaitRelay(ctx context.Context, relay *relay, what string, done func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()

	for !done() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("relay %s did not %s within %v: %w; the end of its log:\n%s",
				relay.node, what, readyWithin, context.Cause(ctx), lastLogLines(relay))
		case <-relay.prog.Done():
			return fmt.Errorf("relay %s ended (%w) before it could %s; the end of its log:\n%s",
				relay.node, relay.prog.Err(), what, lastLogLines(relay))
		case <-tick.C:
		}
	}
	return nil
}

func lastLogLines(relay *relay) string { return formatLastLines(relay.prog) }

// formatLastLines returns the last lines of a program's log, indented.
func formatLastLines(program *devstack.Program) string {
	lines := program.LastLines(lastLines)
	if len(lines) == 0 {
		return "    (it is empty)"
	}
	return "    " + strings.Join(lines, "\n    ")
}

// stopAll stops all processes and blocks until they have ended. No relay may be started after it.
func (r *relays) stopAll(within time.Duration) {
	for _, x := range r.liveRelays() {
		r.stopRelay(x, within)
	}
	close(r.closed)
	r.wg.Wait()
}

// stopRelay begins to stop one process. It does not block.
func (r *relays) stopRelay(relay *relay, within time.Duration) {
	relay.markExpected()
	r.wg.Go(func() { relay.stopProcess(within) })
}

// stopProcess sends SIGTERM, and SIGKILL if the process has not ended within the given time.
func (r *relay) stopProcess(within time.Duration) {
	if r.prog.Terminate() == nil {
		timer := time.NewTimer(within)
		defer timer.Stop()
		select {
		case <-r.prog.Done():
			return
		case <-timer.C:
		}
	}

	// If the kill fails, the guard of the stack ends the process.
	_ = r.prog.Kill()
}
