package admin_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// runReplays makes the stand run replays in the background until the test ends.
func (s *stand) runReplays() admin.Operator {
	s.t.Helper()
	op := admin.New(s.op)
	ctx, cancel := context.WithCancel(context.WithoutCancel(s.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- op.Run(ctx) }()
	s.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Error(err)
		}
	})
	stacktest.Eventually(s.t, "replays run", op.RunsReplays)
	return op
}

// waitQueued waits until everything of the replay is queued.
func (s *stand) waitQueued(r admin.Replays, id string) {
	s.t.Helper()
	stacktest.Eventually(s.t, "replay "+id+" is queued", func() bool {
		info, err := r.Get(s.t.Context(), id)
		if err != nil {
			s.t.Fatal(err)
		}
		return info.State == admin.ReplayDone
	})
}

// Nothing is sent here, as if the topic could not be written. No replay waits for the envelopes of another replay.
func TestReplaysDoNotWaitForATopic(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	s.append(newEnvelopes(3)...)
	s.startWatcher(nil)
	replays := s.runReplays().Replays()

	for i := range 3 {
		info, err := replays.Start(t.Context(), admin.ReplayOrder{IDs: []string{fmt.Sprintf("e%05d", i)}})
		if err != nil {
			t.Fatal(err)
		}
		s.waitQueued(replays, info.ID)
	}
	if n := len(s.queued()); n != 3 {
		t.Errorf("%d envelopes are queued, want 3", n)
	}
}

// An order that the audit log rejects is stored, so it has to run.
func TestAReplayRunsWithoutItsAuditEntry(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	s.append(newEnvelopes(1)...)
	s.startWatcher(nil)
	replays := s.runReplays().Replays()
	audit := s.state.Collection("audit")
	validator := bson.D{{Key: "kind", Value: bson.D{{Key: "$ne", Value: "replay_ordered"}}}}
	if err := audit.Database().RunCommand(t.Context(), bson.D{{Key: "collMod", Value: audit.Name()}, {Key: "validator", Value: validator}}).Err(); err != nil {
		t.Fatal(err)
	}

	info, err := replays.Start(t.Context(), everything)
	// The API responds with the error only.
	if err == nil || info.ID == "" || !strings.Contains(err.Error(), info.ID) {
		t.Fatalf("%+v, %v; want a replay and the error of the audit log, with the id", info, err)
	}
	s.waitQueued(replays, info.ID)
}

// A service may run its operator twice by mistake.
func TestASecondRunOfAnOperatorFails(t *testing.T) {
	t.Parallel()
	s := newStand(t, stacktest.Client(t))
	op := s.runReplays()
	// A run that begins ends without an error.
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := op.Run(ctx); err == nil {
		t.Error("the second run has begun")
	}
}
