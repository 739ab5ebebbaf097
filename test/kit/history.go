//go:build unix

package kit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/resume"
)

// Version is the watcher document after a write, with the fields that the write changed.
type Version struct {
	lease.Document
	Changed []string // top-level fields; nil for the insert
	At      time.Time
}

// History collects all versions of the watcher document.
type History struct {
	scene    *Scene
	mu       sync.Mutex
	versions []Version
	err      error // the last one; nil while the stream is open
	invalid  error // a version that could not be read
	changed  chan struct{}
	token    bson.Raw // of the last place of the stream; only follow uses it
}

// FollowWatcher starts a history. Call it before the first relay starts. It enables post-images on the
// collection.
func (s *Scene) FollowWatcher() *History {
	s.tb.Helper()
	ctx := s.tb.Context()
	images := bson.D{
		{Key: "collMod", Value: statetest.Set(s.tb, s.State).Collection("watchers").Name()},
		{Key: "changeStreamPreAndPostImages", Value: bson.D{{Key: "enabled", Value: true}}},
	}
	if err := s.State.Mongo().RunCommand(ctx, images).Err(); err != nil {
		s.tb.Fatal(err)
	}

	history := &History{scene: s, changed: make(chan struct{})}
	cs, err := history.watch(ctx, nil)
	if err != nil {
		s.tb.Fatal(err)
	}
	run, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { history.follow(run, cs) })
	s.tb.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return history
}

// watch opens the change stream of the watcher documents after a token, or now.
func (h *History) watch(ctx context.Context, after bson.Raw) (*mongo.ChangeStream, error) {
	opts := options.ChangeStream().SetFullDocument(options.Required).SetMaxAwaitTime(200 * time.Millisecond)
	if after != nil {
		opts.SetResumeAfter(after)
	}
	return mongodb.Majority(h.scene.State.Collection("watchers")).Watch(ctx, mongo.Pipeline{}, opts)
}

// maxReopenings bounds the failures of the stream without a version in between, 100 ms apart.
const maxReopenings = 300

// follow collects versions until ctx ends. The driver resumes a stream once, and an election may take longer, so follow opens it again.
func (h *History) follow(ctx context.Context, cs *mongo.ChangeStream) {
	again := time.NewTicker(100 * time.Millisecond)
	defer again.Stop()
	for failures := 0; failures < maxReopenings; failures++ {
		if cs != nil {
			if h.collectVersions(ctx, cs) {
				failures = 0
			}
			h.setError(cs.Err())
			if token := cs.ResumeToken(); token != nil {
				h.token = token
			}
			end, cancel := cleanupContext()
			_ = cs.Close(end)
			cancel()
		}

		select {
		case <-again.C:
		case <-ctx.Done():
			h.setError(nil)
			return
		}
		next, err := h.watch(ctx, h.token)
		h.setError(err)
		cs = next
	}
}

// setError replaces the error of the history.
func (h *History) setError(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = err
}

// collectVersions reads until the stream ends, and reports whether it has read anything.
func (h *History) collectVersions(ctx context.Context, cs *mongo.ChangeStream) (read bool) {
	for cs.Next(ctx) {
		read = true
		var ev struct {
			OperationType     string    `bson:"operationType"`
			WallTime          time.Time `bson:"wallTime"`
			FullDocument      lease.Document
			UpdateDescription struct {
				UpdatedFields bson.Raw `bson:"updatedFields"`
			} `bson:"updateDescription"`
		}
		var raw struct {
			FullDocument bson.Raw `bson:"fullDocument"`
		}
		err := errors.Join(cs.Decode(&ev), bson.Unmarshal(cs.Current, &raw))
		version := Version{At: ev.WallTime}
		if err == nil && raw.FullDocument != nil {
			err = bson.Unmarshal(raw.FullDocument, &version.Document)
		}
		if fields, _ := ev.UpdateDescription.UpdatedFields.Elements(); fields != nil {
			for _, f := range fields {
				version.Changed = append(version.Changed, f.Key())
			}
		}

		h.mu.Lock()
		if err != nil {
			h.invalid = err
		} else if raw.FullDocument != nil && version.ID == WatcherID {
			h.versions = append(h.versions, version)
		}

		close(h.changed)
		h.changed = make(chan struct{})
		h.mu.Unlock()
	}
	return read
}

// WaitFor waits until ok accepts the newest version, and returns that version. what describes it in the
// failure message.
func (h *History) WaitFor(what string, ok func(Version) bool) Version {
	h.scene.tb.Helper()
	timeout := time.NewTimer(Patience)
	defer timeout.Stop()

	for {
		h.mu.Lock()
		news, n := h.changed, len(h.versions)
		var last Version
		if n > 0 {
			last = h.versions[n-1]
		}

		h.mu.Unlock()
		if n > 0 && ok(last) {
			return last
		}

		select {
		case <-news:
		case <-timeout.C:
			h.scene.tb.Fatalf("waiting for %s in the watcher document timed out; last owner %q, epoch %d, seq %d", what, last.Owner, last.Epoch, last.Seq)
		case <-h.scene.tb.Context().Done():
			h.scene.tb.Fatal(h.scene.tb.Context().Err())
		}
	}
}

// Versions returns all versions so far.
func (h *History) Versions() []Version {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]Version(nil), h.versions...)
}

// CheckHistory fails the test for each violation of I5: epoch, seq, token and time never decrease, an
// acquisition has the next epoch and happens only if the lease was free or expired, and only the owner
// writes.
func (h *History) CheckHistory() {
	tb := h.scene.tb
	tb.Helper()
	// The stream may be about to be opened again.
	stacktest.EventuallyIn(tb, Patience, "the change stream of the watcher document", func() bool { return h.readError() == nil },
		func() any { return h.readError() })
	for _, p := range HistoryProblems(h.Versions()) {
		tb.Error(p)
	}
}

func (h *History) readError() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return errors.Join(h.err, h.invalid)
}

// HistoryProblems returns the violations of I5 in a history.
func HistoryProblems(all []Version) (problems []string) {
	bad := func(version Version, format string, args ...any) {
		problems = append(problems, fmt.Sprintf("watcher document at epoch %d, seq %d (%s): ", version.Epoch, version.Seq, version.Owner)+fmt.Sprintf(format, args...))
	}

	for i := 1; i < len(all); i++ {
		before, after := all[i-1], all[i]
		if onlyControlFields(after.Changed) {
			continue
		}

		switch {
		case after.Epoch < before.Epoch:
			bad(after, "the epoch was %d", before.Epoch)
		case after.Epoch > before.Epoch+1:
			bad(after, "the epoch jumped from %d", before.Epoch)
		case after.Epoch == before.Epoch+1:
			if after.Owner == "" || after.Owner == before.Owner {
				bad(after, "a new epoch without a new owner")
			}
			// Both times are the server's $$NOW. The wall time of a write is not comparable: a server
			// thread updates that clock every few milliseconds, and later if it has to wait for a CPU.
			if before.Owner != "" && after.AcquiredAt.Before(before.ExpiresAt) {
				bad(after, "acquired at %s (written at %s) although %s held it until %s", after.AcquiredAt, after.At, before.Owner, before.ExpiresAt)
			}

		case after.Owner != before.Owner && after.Owner != "":
			bad(after, "the owner changed from %s within an epoch", before.Owner)
		case before.Owner == "" && after.Owner == "":
			bad(after, "written without an owner: %v", after.Changed)
		}

		if after.Seq < before.Seq || after.Seq == before.Seq && !onlyFenceFields(after.Changed) && after.Epoch == before.Epoch {
			bad(after, "seq was %d; changed %v", before.Seq, after.Changed)
		}
		// After a gap, a position has a time but no token.
		if at := (resume.Position{Token: after.Token, ClusterTime: after.ClusterTime}); at.Compare(resume.Position{Token: before.Token, ClusterTime: before.ClusterTime}) < 0 {
			bad(after, "the token went back from %s to %s", before.Token, after.Token)
		}
		if after.ClusterTime.Before(before.ClusterTime) {
			bad(after, "the time went back from %v to %v", before.ClusterTime, after.ClusterTime)
		}
		if after.Fence < before.Fence {
			bad(after, "the fence went back from %d to %d", before.Fence, after.Fence)
		}
	}
	return problems
}

func onlyControlFields(fields []string) bool { return allNamed(fields, "control") }
func onlyFenceFields(fields []string) bool {
	return allNamed(fields, "fence", "beside", "session")
}

func allNamed(fields []string, names ...string) bool {
	for _, f := range fields {
		ok := false
		for _, n := range names {
			ok = ok || f == n || len(f) > len(n) && f[:len(n)+1] == n+"."
		}
		if !ok {
			return false
		}
	}
	return len(fields) > 0
}
