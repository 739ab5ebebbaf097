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

	"github.com/outrelay/outrelay/internal/devstack"
)

const (
	watcher  = "dev"
	leaseTTL = 2 * time.Second
	renew    = 400 * time.Millisecond

	readyWithin = 60 * time.Second // a new relay, until it stands by or works
	stopWithin  = 15 * time.Second // after SIGTERM, until it is killed; its drain takes up to 10 s
	lastLines   = 12               // of the log of a relay that ended by itself
)

// relay is one process of `outrelay run`.
type relay struct {
	node string
	http string
	prog *devstack.Program

	mu       sync.Mutex
	expected bool // it was told to end
}

// expect notes that the process is about to be ended on purpose.
func (r *relay) expect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expected = true
}

func (r *relay) isExpected() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.expected
}

// relays are the processes of one watcher. A dead one is not started again: a new node takes its place.
type relays struct {
	stack  *devstack.Stack
	binary string
	env    []string
	config string
	set    []string // further arguments of the processes
	client *http.Client
	ended  chan *relay   // each process that ends, in whatever way
	closed chan struct{} // nobody reads ended any more
	wg     sync.WaitGroup

	mu   sync.Mutex
	seq  int
	live []*relay
}

// newRelays writes the configuration of the relays into the stack's directory; set are sections of it that replace those
// of the demo.
func newRelays(stack *devstack.Stack, as names, binary string, env []string, set map[string]any) (*relays, error) {
	r := &relays{
		stack: stack, binary: binary, env: withoutOwn(env), config: filepath.Join(stack.Dir(), "outrelay.yaml"),
		client: &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}},
		ended:  make(chan *relay), closed: make(chan struct{}),
	}
	config := map[string]any{
		"watcher": watcher,
		"mongodb": map[string]any{"uri": stack.MongoURI(), "state": as.state},
		"watch":   []string{as.database + ".outbox"},
		"topics":  map[string]any{"template": as.topic("{aggregatetype}")},
		"kafka":   map[string]any{"brokers": stack.Brokers()},
		"lease":   map[string]any{"ttl": leaseTTL.String(), "renew": renew.String()},
		"log":     map[string]any{"level": "info", "format": "text"},
	}
	maps.Copy(config, set)
	text, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("writing the relays' configuration: %w", err)
	}
	if err := os.WriteFile(r.config, text, 0o600); err != nil {
		return nil, fmt.Errorf("writing the relays' configuration: %w", err)
	}
	return r, nil
}

// withoutOwn drops the user's settings of outrelay: the demo is the same everywhere.
func withoutOwn(env []string) []string {
	out := []string{}
	for _, v := range env {
		if !strings.HasPrefix(v, "OUTRELAY_") {
			out = append(out, v)
		}
	}
	return out
}

// spawn starts one more process.
func (r *relays) spawn() (*relay, error) {
	addr, err := devstack.FreeAddress()
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seq++
	one := &relay{node: "a-" + strconv.Itoa(r.seq), http: addr}
	args := append([]string{"run", "--config", r.config, "--set", "node=" + one.node, "--set", "http.listen=" + addr, "--set", "address=" + addr}, r.set...)
	one.prog, err = r.stack.Run(one.node, r.env, r.binary, args...)
	if err != nil {
		return nil, err
	}
	r.live = append(r.live, one)
	r.wg.Go(func() {
		<-one.prog.Done()
		r.remove(one)
		select {
		case r.ended <- one:
		case <-r.closed:
		}
	})
	return one, nil
}

func (r *relays) remove(one *relay) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, x := range r.live {
		if x == one {
			r.live = append(r.live[:i:i], r.live[i+1:]...)
			return
		}
	}
}

// all are those that run.
func (r *relays) all() []*relay {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]*relay(nil), r.live...)
}

// named is the running relay of that node; nil without one.
func (r *relays) named(node string) *relay {
	for _, x := range r.all() {
		if x.node == node {
			return x
		}
	}
	return nil
}

// standby is a relay other than the owner that is ready to take over; nil without one.
func (r *relays) standby(ctx context.Context, owner string) *relay {
	for _, x := range r.all() {
		if x.node != owner && !x.isExpected() && r.role(ctx, x) == "standby" {
			return x
		}
	}
	return nil
}

// role is what the process says it does; "" if it is not ready.
func (r *relays) role(ctx context.Context, x *relay) string {
	var said struct {
		Ready bool   `json:"ready"`
		Role  string `json:"role"`
	}
	err := r.get(ctx, x, "/readyz", func(s *bufio.Reader) error { return json.NewDecoder(s).Decode(&said) })
	if err != nil || !said.Ready {
		return ""
	}
	return said.Role
}

// counter reads one counter without labels from the metrics of a process.
func (r *relays) counter(ctx context.Context, x *relay, name string) (value float64, err error) {
	err = r.get(ctx, x, "/metrics", func(body *bufio.Reader) error {
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

func (r *relays) get(ctx context.Context, x *relay, path string, read func(*bufio.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+x.http+path, nil)
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

// await waits until done says so, the process ends or time is up.
func (r *relays) await(ctx context.Context, x *relay, what string, done func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("relay %s did not %s within %v: %w; the end of its log:\n%s", x.node, what, readyWithin, context.Cause(ctx), tail(x))
		case <-x.prog.Done():
			return fmt.Errorf("relay %s ended (%w) before it could %s; the end of its log:\n%s", x.node, x.prog.Err(), what, tail(x))
		case <-tick.C:
		}
	}
	return nil
}

func tail(x *relay) string { return tailOf(x.prog) }

func tailOf(p *devstack.Program) string {
	lines := p.LastLines(lastLines)
	if len(lines) == 0 {
		return "    (it is empty)"
	}
	return "    " + strings.Join(lines, "\n    ")
}

// stop ends all: gracefully, then by force. Nothing is spawned afterwards.
func (r *relays) stop(within time.Duration) {
	for _, x := range r.all() {
		r.end(x, within)
	}
	close(r.closed)
	r.wg.Wait()
}

// end begins to end one.
func (r *relays) end(x *relay, within time.Duration) {
	x.expect()
	r.wg.Go(func() { x.end(within) })
}

// end asks the process to stop and kills it when it does not.
func (r *relay) end(within time.Duration) {
	if r.prog.Terminate() == nil {
		t := time.NewTimer(within)
		defer t.Stop()
		select {
		case <-r.prog.Done():
			return
		case <-t.C:
		}
	}
	_ = r.prog.Kill() // the guard of the stack ends what cannot be ended here
}
