package consumer

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

const (
	// readyAfter is how long trouble lasts before Status.Ready becomes false.
	readyAfter = 30 * time.Second
	// liveAfter is how long the loop of reportGauges may make no progress in a process that works.
	liveAfter = time.Minute
	// healthInterval is how often the messages that are set aside are counted in the database.
	healthInterval = 5 * time.Second
	// healthTimeout bounds a call of Kafka.
	healthTimeout = 5 * time.Second
	// maxUnknown is the maximum number of names in Status.Unknown.
	maxUnknown = 100
)

// The kinds of trouble that make a consumer not ready. They begin a sentence that an error may follow.
const (
	healthGroup   = "the consumer is not a member of its group"
	healthKafka   = "Kafka does not respond"
	healthMongoDB = "MongoDB does not respond"
	healthOutage  = "nothing is fetched until MongoDB responds"
	healthDecoder = "the decoder is unavailable, and nothing is read"
)

// health is the state of a consumer that Status reports without I/O.
type health struct {
	now func() time.Time // time.Now, except in tests

	mu      sync.Mutex
	running bool
	failed  error // of the last Run
	beatAt  time.Time
	trouble map[string]problem      // by kind
	countAt time.Time               // of the last count of messages that are set aside
	waiting map[string]waitingCount // by handler
	strays  []StrayStatus
	unknown map[string]int64
}

// problem is a trouble that has not ended.
type problem struct {
	since time.Time
	text  string
}

// waitingCount describes the messages of a handler that are set aside.
type waitingCount struct {
	n      int
	oldest time.Duration // since the first failure of the oldest, at the time of the count
}

func newHealth() *health {
	return &health{now: time.Now, trouble: map[string]problem{}, waiting: map[string]waitingCount{}, unknown: map[string]int64{}}
}

// note records that there is trouble of this kind, or with nil that there is none. It reports whether that is new.
func (h *health) note(kind string, err error) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	problem, known := h.trouble[kind]
	if err == nil {
		delete(h.trouble, kind)
		return known
	}

	// The trouble began with the first error of its kind.
	if !known {
		problem.since = h.now()
	}
	problem.text = kind
	if text := errorText(err); text != kind {
		problem.text += ": " + text
	}
	h.trouble[kind] = problem
	return !known
}

// beat records that the loop of reportGauges works.
func (h *health) beat() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.beatAt = h.now()
}

// join records the beginning or the end of a membership in the group.
func (h *health) join(member bool) {
	if member {
		h.beat()
		h.note(healthGroup, nil)
		return
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	// Only a member measures Kafka. If an outage of Kafka has ended the membership, the trouble began with the outage.
	since := h.now()
	if outage, known := h.trouble[healthKafka]; known {
		since = outage.since
		delete(h.trouble, healthKafka)
	}
	h.trouble[healthGroup] = problem{since, healthGroup}
}

// begin records that Run has begun.
func (h *health) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running, h.failed = true, nil
	// A member is ready only once it is in the group.
	h.trouble[healthGroup] = problem{text: healthGroup}
}

// end records that Run has ended.
func (h *health) end(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running, h.failed = false, err
	clear(h.trouble)
}

// countUnknown counts a message whose name no handler takes.
func (h *health) countUnknown(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, counted := h.unknown[name]; counted || len(h.unknown) < maxUnknown {
		h.unknown[name]++
	}
}

// isReady reports whether all trouble is recent, and returns its texts.
func (h *health) isReady() (ready bool, reasons []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.running {
		return false, []string{"Run is not running"}
	}

	ready = true
	for _, kind := range slices.Sorted(maps.Keys(h.trouble)) {
		problem := h.trouble[kind]
		reasons = append(reasons, problem.text)
		ready = ready && h.now().Sub(problem.since) < readyAfter
	}
	return ready, reasons
}

// isLive reports whether the consumer can make progress without help.
func (h *health) isLive(member bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.failed == nil && !(member && h.now().Sub(h.beatAt) > liveAfter)
}

// setCensus records the messages of the group that are set aside, which were counted at a time.
func (h *health) setCensus(countedAt time.Time, waiting map[string]waitingCount, strays []StrayStatus) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.countAt, h.waiting, h.strays = countedAt, waiting, strays
}

// countOf returns the last count of a handler, and its time.
func (h *health) countOf(handler string) (n int, countedAt time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.waiting[handler].n, h.countAt
}

// refreshHealth counts the messages that are set aside in the database, until ctx ends.
func (r *run) refreshHealth(ctx context.Context) {
	defer r.leaveCensus(ctx)

	for {
		r.measureSuspensions()
		if r.c.waiting != nil {
			err := r.takeCensus(ctx)
			r.c.health.note(healthMongoDB, err)
			if ctx.Err() == nil {
				r.noteDatabase(err)
			}
		}
		if retry.Sleep(ctx, healthInterval) != nil {
			return
		}
	}
}

// measureSuspensions measures which handlers are suspended.
func (r *run) measureSuspensions() {
	for _, reg := range r.c.reg.snapshot().all {
		measurement := telemetry.Measurement{Metric: telemetry.Suspended, Handler: reg.name, Reason: "handler"}
		if reg.suspension.isSuspended() {
			measurement.N = 1
		}
		r.c.measure(measurement)
	}
}

// HealthHandler serves /livez and /readyz: 200 or 503, with the Status as JSON. It does no I/O.
//
// /readyz fails while Status.Ready is false. /livez fails if the consumer cannot make progress without a restart: Run has
// returned an error, or its loops hang. Outages of MongoDB and Kafka never make it fail.
func (c *Consumer) HealthHandler() http.Handler {
	mux := http.NewServeMux()
	serve := func(path string, isOK func(status *Status) bool) {
		mux.HandleFunc("GET "+path, func(response http.ResponseWriter, _ *http.Request) {
			status := c.Status()
			response.Header().Set("Content-Type", "application/json")
			if !isOK(&status) {
				response.WriteHeader(http.StatusServiceUnavailable)
			}
			_ = json.NewEncoder(response).Encode(status)
		})
	}

	serve("/livez", func(*Status) bool { return c.health.isLive(c.currentSession.Load() != nil) })
	serve("/readyz", func(status *Status) bool { return status.Ready })
	return mux
}
