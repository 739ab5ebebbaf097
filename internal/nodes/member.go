package nodes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/store"
)

// The times of the registry.
const (
	// BeatEvery is between two heartbeats.
	BeatEvery = 2 * time.Second
	// StaleAfter is the silence after which a node counts as dead: five heartbeats missed.
	StaleAfter = 5 * BeatEvery
	// ForgetAfter is the silence after which a node is not listed any more: one that was killed cannot leave by itself, and
	// the next process may have another name.
	ForgetAfter = 14 * 24 * time.Hour
	// TidyEvery is between two removals of what is too old, in the list of nodes and in the events log.
	TidyEvery = time.Hour
)

// Role is what a node does for its deployment.
type Role string

// The roles. A service that only appends events is no node: it needs nothing of the state database.
const (
	Producer Role = "producer" // a service that carries the relay in its own process
	Relay    Role = "relay"    // runs watchers, or stands by for them
	Cleaner  Role = "cleaner"  // removes what was delivered, while it runs a watcher
	Admin    Role = "admin"    // serves the operators' API and page
)

// Config is what a member tells of itself. State and Node are needed.
type Config struct {
	State                  *mongo.Database
	Node, Address, Version string
	Watcher                string // that it works for; "" for none
	Roles                  []Role
	Capabilities           []string
	// Schema is the number of the last migration that it knows.
	Schema int
	// Fingerprint is of the part of the configuration that must be the same on all nodes of the watcher; "" compares nothing.
	Fingerprint string
	Log         *slog.Logger // nil logs nothing
}

// Vital is what changes from one heartbeat to the next.
type Vital struct {
	KafkaReachable bool
	SinceAck       time.Duration // below 0: never
	Slots          int           // into which the node divides its watcher
	Holds          []string      // slots that it owns, as watcher/<i>of<N>
}

// Member is this process in the registry. Its methods may be called from several goroutines.
type Member struct {
	cfg           Config
	nodes         *store.Nodes
	majorityNodes *store.Nodes // the same with majority, for what others must not miss
	events        *store.Events
	heartbeat     store.Sign
	startedAt     time.Time
	instance      string

	mu                sync.Mutex // one heartbeat at a time
	listed            bool       // by this process
	left              bool
	duplicateLogged   bool
	loggedDifferences map[string]bool // nodes with another configuration, told once
}

// New makes a member; it does no I/O.
func New(c Config) *Member {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	coll := c.State.Collection("nodes")
	m := &Member{
		cfg: c, nodes: store.NewNodes(coll), majorityNodes: store.NewNodes(store.Majority(coll)),
		events:    store.NewEvents(c.State.Collection("events"), c.Watcher, c.Node),
		startedAt: time.Now(), instance: uuid.NewString(), loggedDifferences: map[string]bool{},
	}
	m.heartbeat = store.Sign{Node: c.Node, Address: c.Address, Version: c.Version, Facts: store.Facts{
		Instance: m.instance, Schema: c.Schema, Capabilities: c.Capabilities, Config: c.Fingerprint,
	}}
	if c.Watcher != "" {
		m.heartbeat.Watchers = []string{c.Watcher}
	}
	for _, r := range c.Roles {
		m.heartbeat.Roles = append(m.heartbeat.Roles, string(r))
	}
	return m
}

// Beat gives a sign of life. The first one lists the process, with majority, so that whoever looks at the list afterwards
// sees it. After [Member.Leave] it does nothing.
func (m *Member) Beat(ctx context.Context, v Vital) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left {
		return nil
	}
	s, nodes := m.heartbeat, m.nodes
	s.Listed = m.listed
	s.KafkaReachable, s.SinceAck, s.Slots, s.Holds, s.Up = v.KafkaReachable, v.SinceAck, v.Slots, v.Holds, time.Since(m.startedAt)
	if !m.listed {
		nodes = m.majorityNodes
		// A stop waits for it, so that it is not carried out behind the departure.
		if end, ok := ctx.Deadline(); ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(context.WithoutCancel(ctx), end)
			defer cancel()
		}
	}
	was, err := nodes.Heartbeat(ctx, s)
	if err != nil {
		return err
	}
	first := !m.listed
	m.listed = true
	m.logFindings(ctx, was, first)
	return nil
}

// logFindings writes down what a heartbeat found.
func (m *Member) logFindings(ctx context.Context, was store.Was, first bool) {
	another := was.Listed && was.Instance != m.instance
	switch {
	case first:
		m.logEvent(ctx, store.NodeStarted, bson.D{{Key: "version", Value: m.cfg.Version}, {Key: "address", Value: m.cfg.Address}, {Key: "roles", Value: m.heartbeat.Roles}})
	case !was.Listed:
		m.cfg.Log.Warn("this node was taken off the list of nodes while it ran; it is listed again", "node", m.cfg.Node)
		m.logEvent(ctx, store.NodeListed, nil)
	case another && !m.duplicateLogged:
		m.cfg.Log.Error("another process has the name of this node: pins, status and the list of nodes mean either of them; give each process a name of its own (node)", "node", m.cfg.Node)
		m.logEvent(ctx, store.NodeTwice, nil)
	case was.Stale && !another:
		m.logEvent(ctx, store.NodeReturned, bson.D{{Key: "silent_ms", Value: was.Age.Milliseconds()}})
	}
	m.duplicateLogged = m.duplicateLogged || another && !first
}

// Leave takes the process off the list, so that nobody waits for it to grow stale. Where another process of the same name is
// listed by now, that one stays.
func (m *Member) Leave(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.left = true
	gone, err := m.nodes.Depart(ctx, m.cfg.Node, m.instance)
	if err != nil || !gone {
		return err
	}
	m.listed = false
	return m.appendEvent(ctx, store.NodeStopped, bson.D{{Key: "up_ms", Value: time.Since(m.startedAt).Milliseconds()}})
}

// Look notes nodes that fell silent since anybody looked, and those of the same watcher whose configuration differs from
// this one's. One read, and one write for each finding.
func (m *Member) Look(ctx context.Context) error {
	silent, err := m.nodes.MarkStale(ctx, StaleAfter)
	for _, n := range silent {
		m.cfg.Log.Warn("a node gives no sign of life; what it owned is taken over when its leases expire", "silent_node", n.Node, "for", n.Age().Round(time.Second))
		m.logEvent(ctx, store.NodeStale, bson.D{
			{Key: "of", Value: n.Node}, {Key: "silent_ms", Value: n.AgeMS}, {Key: "version", Value: n.Version}, {Key: "held", Value: nonNilSlots(n.Holds)},
		})
	}
	if err != nil || m.cfg.Fingerprint == "" {
		return err
	}
	return m.compareConfigs(ctx)
}

func nonNilSlots(slots []string) []string {
	if slots == nil {
		return []string{}
	}
	return slots
}

// compareConfigs finds nodes that would do the watcher's work otherwise than this one.
func (m *Member) compareConfigs(ctx context.Context) error {
	list, err := m.nodes.List(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range list {
		one := n.Node + " " + n.Facts.Config
		if !m.sameWatcher(n) || n.Facts.Config == "" || n.Facts.Config == m.cfg.Fingerprint || !n.Alive(StaleAfter) || m.loggedDifferences[one] {
			continue
		}
		m.loggedDifferences[one] = true
		m.cfg.Log.Warn("a node of this watcher has another configuration: what is delivered depends on who owns the watcher; give all of them the same", "other", n.Node, "other_version", n.Version)
		m.logEvent(ctx, store.ConfigDiffers, bson.D{{Key: "of", Value: n.Node}, {Key: "version", Value: n.Version}})
	}
	return nil
}

func (m *Member) sameWatcher(n store.Node) bool {
	for _, w := range n.Watchers {
		if w == m.cfg.Watcher && n.Node != m.cfg.Node {
			return true
		}
	}
	return false
}

// Tidy removes the nodes that were silent for long, and the oldest entries of the events log beyond its bound. Other
// entries are removed by an index as they age.
func (m *Member) Tidy(ctx context.Context) error {
	n, err := m.nodes.Forget(ctx, ForgetAfter)
	if n > 0 {
		m.cfg.Log.Debug("nodes that are gone are listed no longer", "count", n)
	}
	if err != nil {
		return err
	}
	return m.events.Trim(ctx)
}

// logEvent is append for what harms nobody if it is lost.
func (m *Member) logEvent(ctx context.Context, kind store.Kind, fields bson.D) {
	if err := m.appendEvent(ctx, kind, fields); err != nil && !errors.Is(ctx.Err(), context.Canceled) { // of a stop nobody has to hear
		m.cfg.Log.Warn("an entry of the events log is lost", "kind", string(kind), "reason", err)
	}
}

func (m *Member) appendEvent(ctx context.Context, kind store.Kind, fields bson.D) error {
	if err := m.events.Append(ctx, kind, fields); err != nil {
		return fmt.Errorf("noting %s: %w", kind, err)
	}
	return nil
}

// Note writes an entry about this node into the events log. It says so in the process's log where that fails.
func (m *Member) Note(ctx context.Context, kind store.Kind, fields bson.D) {
	m.logEvent(ctx, kind, fields)
}
