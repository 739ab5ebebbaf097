package nodes

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// The intervals of the registry.
const (
	// BeatEvery is the time between two heartbeats.
	BeatEvery = 2 * time.Second
	// StaleAfter is the silence after which a node counts as dead: five missed heartbeats.
	StaleAfter = 5 * BeatEvery
	// forgetAfter is the silence after which a node is removed from the list. A killed process cannot
	// leave, and the process that replaces it may have another name.
	forgetAfter = 14 * 24 * time.Hour
	// TidyEvery is the time between two removals of old nodes and old entries of the audit log.
	TidyEvery = time.Hour
)

// Task is a task of a node in its deployment.
type Task string

// The tasks. A service that only appends events is not a node, because it does not use the state
// database.
const (
	Producer Task = "producer" // a service that runs the relay in its own process
	Relay    Task = "relay"    // runs watchers, or stands by for them
	Cleaner  Task = "cleaner"  // removes delivered envelopes while it runs a watcher
	Admin    Task = "admin"    // serves the operators' API and page
)

// Config describes this process. State and Node are required.
type Config struct {
	State                  state.Database
	Node, Address, Version string
	Watcher                string // that the process works for; "" for none
	Tasks                  []Task
	Capabilities           []string
	// Fingerprint is a hash of the settings that must be equal on all nodes of the watcher. If it is
	// empty, configurations are not compared.
	Fingerprint string
	Log         *slog.Logger // nil discards everything
}

// Vitals holds the figures that change from one heartbeat to the next.
type Vitals struct {
	KafkaReachable bool
	SinceAck       time.Duration // below 0: never
	ClockAhead     time.Duration // by which this machine's clock is ahead of the server's
	Slots          int           // number of slots in which the node divides its watcher
	Holds          []string      // slots that it owns, as watcher/<i>of<N>
}

// Member is this process in the registry. Its methods are safe for concurrent use.
type Member struct {
	cfg           Config
	nodes         *Nodes
	majorityNodes *Nodes // nodes with majority, for writes that other processes must see
	events        *AuditLog
	heartbeat     Sign
	startedAt     time.Time
	instance      string

	mu                sync.Mutex // serializes the heartbeats
	listed            bool       // by this process
	silent            bool       // the last heartbeat failed
	resumedAt         time.Time  // when a heartbeat succeeded after a long time without one
	left              bool
	duplicateLogged   bool
	loggedDifferences map[string]bool // nodes with another configuration
}

// New returns a member. It does no I/O.
func New(cfg Config) *Member {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}

	coll := cfg.State.Collection("nodes")
	member := &Member{
		cfg:           cfg,
		nodes:         NewNodes(coll),
		majorityNodes: NewNodes(mongodb.Majority(coll)),
		events:        NewAuditLog(cfg.State.Collection("audit"), cfg.Watcher, cfg.Node),
		startedAt:     time.Now(),
		instance:      uuid.NewString(),

		loggedDifferences: map[string]bool{},
	}

	member.heartbeat = Sign{Node: cfg.Node, Address: cfg.Address, Version: cfg.Version, Facts: Facts{
		Instance: member.instance, Capabilities: cfg.Capabilities, Config: cfg.Fingerprint,
	}}
	if cfg.Watcher != "" {
		member.heartbeat.Watchers = []string{cfg.Watcher}
	}
	for _, r := range cfg.Tasks {
		member.heartbeat.Tasks = append(member.heartbeat.Tasks, string(r))
	}
	return member
}

// SendHeartbeat sends a heartbeat. The first one lists the process and is majority committed, so that every later
// reader of the list sees it. After [Member.Leave] SendHeartbeat does nothing.
func (m *Member) SendHeartbeat(ctx context.Context, vitals Vitals) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left {
		return nil
	}

	sign := m.heartbeat
	sign.Listed = m.listed
	sign.KafkaReachable, sign.SinceAck = vitals.KafkaReachable, vitals.SinceAck
	sign.Slots, sign.Holds, sign.ClockAhead = vitals.Slots, vitals.Holds, vitals.ClockAhead
	sign.Up = time.Since(m.startedAt)

	nodes := m.nodes
	if !m.listed {
		nodes = m.majorityNodes

		// A stop does not interrupt the first heartbeat. Otherwise the server could execute it after
		// the departure.
		if end, ok := ctx.Deadline(); ok {
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(context.WithoutCancel(ctx), end)
			defer cancel()
		}
	}

	was, err := nodes.Heartbeat(ctx, sign)
	m.silent = err != nil
	if err != nil {
		return err
	}

	first := !m.listed
	m.listed = true
	if !first && was.Instance == m.instance && was.Age > StaleAfter/2 {
		m.resumedAt = time.Now()
	}
	m.logFindings(ctx, was, first)
	return nil
}

// logFindings logs the state of the entry that a heartbeat has replaced, if it was not the expected one.
func (m *Member) logFindings(ctx context.Context, was Was, first bool) {
	another := was.Listed && was.Instance != m.instance
	switch {
	case first:
		m.LogEvent(ctx, NodeStarted, bson.D{
			{Key: "version", Value: m.cfg.Version}, {Key: "address", Value: m.cfg.Address}, {Key: "tasks", Value: m.heartbeat.Tasks},
		})

	case !was.Listed:
		m.cfg.Log.Warn("this node was removed from the list of nodes while it runs; it is listed again", "node", m.cfg.Node)
		m.LogEvent(ctx, NodeListed, nil)

	case another && !m.duplicateLogged:
		m.cfg.Log.Error("another process uses the same node name, so pins, status and the list of nodes are ambiguous",
			"node", m.cfg.Node, "fix", "set a different node name (node) for each process")
		m.LogEvent(ctx, NodeTwice, nil)

	case was.Stale && !another:
		m.LogEvent(ctx, NodeReturned, bson.D{{Key: "silent_ms", Value: was.Age.Milliseconds()}})
	}

	// Two processes alternate with each heartbeat, so the problem is reported once.
	if another && !first {
		m.duplicateLogged = true
	}
}

// Leave removes the process from the list, so that it is not reported as stale later. If another process
// of the same name is listed by now, its entry stays.
func (m *Member) Leave(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.left = true

	removed, err := m.nodes.Depart(ctx, m.cfg.Node, m.instance)
	if err != nil || !removed {
		return err
	}
	m.listed = false

	m.LogEvent(ctx, NodeStopped, bson.D{{Key: "up_ms", Value: time.Since(m.startedAt).Milliseconds()}})
	return nil
}

// CheckPeers logs the nodes that have become stale since the last call of any node, and the nodes of the same
// watcher with another configuration. It costs one read, and one write per finding.
func (m *Member) CheckPeers(ctx context.Context) error {
	// A node that cannot send heartbeats cannot judge others: if MongoDB was away, they were silent for the same reason, and
	// return within an interval.
	m.mu.Lock()
	silent, resumed := m.silent, m.resumedAt
	m.mu.Unlock()
	if silent || !resumed.IsZero() && time.Since(resumed) < StaleAfter {
		return nil
	}

	stale, err := m.nodes.MarkStale(ctx, StaleAfter)
	for _, n := range stale {
		m.cfg.Log.Warn("node is not responding; other nodes take over when its leases expire",
			"stale_node", n.Node, "for", n.Age().Round(time.Second))
		m.LogEvent(ctx, NodeStale, bson.D{
			{Key: "of", Value: n.Node},
			{Key: "silent_ms", Value: n.AgeMS},
			{Key: "version", Value: n.Version},
			{Key: "held", Value: append([]string{}, n.Holds...)},
		})
	}
	if err != nil || m.cfg.Fingerprint == "" {
		return err
	}

	return m.compareConfigs(ctx)
}

// compareConfigs logs each live node of the same watcher whose configuration differs, once per
// configuration.
func (m *Member) compareConfigs(ctx context.Context) error {
	list, err := m.nodes.List(ctx)
	if err != nil {
		return err
	}

	// The differences are logged once, and two checks may overlap.
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range list {
		config := n.Facts.Config
		another := n.Node != m.cfg.Node && slices.Contains(n.Watchers, m.cfg.Watcher)
		if !another || config == "" || config == m.cfg.Fingerprint || !n.Alive(StaleAfter) {
			continue
		}

		difference := n.Node + " " + config
		if m.loggedDifferences[difference] {
			continue
		}
		m.loggedDifferences[difference] = true
		m.cfg.Log.Warn("a node of this watcher has another configuration; delivery depends on the owner",
			"other", n.Node, "other_version", n.Version, "fix", "use the same configuration on all nodes")
		m.LogEvent(ctx, ConfigDiffers, bson.D{{Key: "of", Value: n.Node}, {Key: "version", Value: n.Version}})
	}
	return nil
}

// RemoveOld removes the nodes that have been silent for [forgetAfter], and the oldest entries of the events
// log above its limit. An index of the audit log removes its other entries by age.
func (m *Member) RemoveOld(ctx context.Context) error {
	n, err := m.nodes.Forget(ctx, forgetAfter)
	if n > 0 {
		m.cfg.Log.Debug("removed nodes that are gone from the list", "count", n)
	}
	if err != nil {
		return err
	}
	_, err = m.events.Trim(ctx, entriesKept)
	return err
}

// LogEvent writes an entry about this node into the audit log. It blocks as [AuditLog.AppendOrWarn] does.
func (m *Member) LogEvent(ctx context.Context, kind Kind, fields bson.D) {
	m.events.AppendOrWarn(ctx, m.cfg.Log, kind, fields)
}
