package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/demo/check"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/pkg/event"
)

var historyScenario = Scenario{
	Name:       "lost-history",
	Promise:    "the oplog rolls over while the relay is down: nothing is lost or out of order, and repeated events are flagged",
	events:     200_000,
	rate:       300,
	ownServers: true,
	// The server truncates the oplog only after a checkpoint, so checkpoints are frequent.
	mongo: devstack.MongoOptions{OplogMB: 16, Args: []string{"--syncdelay", "1"}},
	run:   runHistory,
}

// HistoryFinding is the result of scenario lost-history.
type HistoryFinding struct {
	Outcome
	Orphaned    int     `json:"orphaned"`      // events that the change stream could no longer supply
	Redelivered int     `json:"redelivered"`   // records with the redelivered header
	Repeated    int     `json:"repeated"`      // records of Redelivered for an event that was delivered before
	Gaps        int     `json:"gaps"`          // that were swept
	AwayS       float64 `json:"oplog_lost_s"`  // how long the relay was down
	SweepS      float64 `json:"sweep_seconds"` // from the start of the relay until the last orphaned event arrived
	SweepRate   float64 `json:"sweep_rate"`    // orphaned events per second in that time
}

func (f *HistoryFinding) describeFigures() []string {
	return []string{
		fmt.Sprintf("orphaned          %s events that the change stream could not supply, in %d gaps",
			formatThousands(f.Orphaned), f.Gaps),
		fmt.Sprintf("redelivered       %s records are flagged, %s of them repeat an earlier one",
			formatThousands(f.Redelivered), formatThousands(f.Repeated)),
		fmt.Sprintf("swept             in %.1f s, start of the relay included: %s a second",
			f.SweepS, formatThousands(int(f.SweepRate))),
	}
}

func runHistory(ctx context.Context, stage *stage) (Finding, error) {
	finding := &HistoryFinding{}
	position, err := stage.deliverSome(ctx)
	if err != nil {
		return finding, err
	}

	// The events of the gap: the oplog no longer covers them.
	down := time.Now()
	if finding.Orphaned, err = stage.orphanEvents(ctx, position); err != nil {
		return finding, err
	}
	// This transaction is open when the sweep begins, which cannot read its events yet.
	slow, err := stage.openTransaction(ctx)
	if err != nil {
		return finding, err
	}
	defer slow.session.EndSession(context.WithoutCancel(ctx))
	live, err := stage.startLoad(ctx, aggregate, "walk-in", stage.options.Rate, 0)
	if err != nil {
		return finding, err
	}
	if err := stage.runFor(ctx, time.Second); err != nil {
		return finding, err
	}

	began := time.Now()
	finding.AwayS = roundSeconds(began.Sub(down))
	if _, err := stage.relays.startRelay(); err != nil {
		return finding, err
	}
	stage.printEvent("the relay is back; during the sweep the service appends %d events/s, "+
		"and a transaction is open at the beginning", stage.options.Rate)
	if err := stage.awaitSweep(ctx, slow, finding, began); err != nil {
		return finding, err
	}
	if err := live.finishLoad(true); err != nil {
		return finding, err
	}
	if err := stage.awaitArrival(ctx); err != nil {
		return finding, err
	}

	// A sweep flags each record, because the event may have been sent before.
	report := stage.check.Report()
	finding.Redelivered = report.Flagged
	finding.Repeated = report.Repeated
	if finding.Redelivered < finding.Orphaned {
		stage.recordBroken("%d records are flagged as redelivered, although %d events were swept", finding.Redelivered, finding.Orphaned)
	}
	return finding, stage.notHalted(ctx)
}

// deliverSome runs a relay for a few events and stops it. It returns the relay's position.
func (s *stage) deliverSome(ctx context.Context) (bson.Timestamp, error) {
	relay, err := s.startAndAwait(ctx, "owner")
	if err != nil {
		return bson.Timestamp{}, err
	}
	load, err := s.startLoad(ctx, aggregate, "customer", 1000, 500)
	if err != nil {
		return bson.Timestamp{}, err
	}
	if err := load.finishLoad(false); err != nil {
		return bson.Timestamp{}, err
	}
	if err := s.awaitArrival(ctx); err != nil {
		return bson.Timestamp{}, err
	}
	// The position must not move any more: the events of the gap come after it.
	s.stopAndWait(relay)

	doc, _, err := lease.Read(ctx, s.follow.coll, watcherID)
	if err != nil {
		return bson.Timestamp{}, err
	}
	s.printEvent("the relay is stopped")
	return doc.ClusterTime, nil
}

// orphanEvents appends events, and then fills the oplog until it no longer contains the position.
// It returns the number of appended events.
func (s *stage) orphanEvents(ctx context.Context, position bson.Timestamp) (int, error) {
	before, _ := s.check.Progress()
	load, err := s.startLoad(ctx, aggregate, "customer", s.options.Rate, s.options.Events, appendInBulk)
	if err != nil {
		return 0, err
	}
	done := false
	err = s.awaitSetUp(ctx, "the backlog is appended", 2*patience, func() bool {
		committed, _ := s.check.Progress()
		done = committed-before >= s.options.Events
		return done
	})
	if err = errors.Join(err, load.finishLoad(!done)); err != nil {
		return 0, err
	}
	committed, _ := s.check.Progress()

	// Documents of another collection fill the oplog without adding envelopes.
	noise := s.client.Database("noise").Collection("noise")
	for {
		for range 4 {
			if _, err := noise.InsertOne(ctx, bson.D{{Key: "bytes", Value: make([]byte, 512<<10)}}); err != nil {
				return 0, fmt.Errorf("filling the oplog: %w", err)
			}
		}

		oldest, err := s.oldestOplogEntry(ctx)
		if err != nil {
			return 0, err
		}
		if oldest.After(position) {
			break
		}
		if err := s.runFor(ctx, lookEvery); err != nil {
			return 0, err
		}
	}
	s.printEvent("%s events are appended in the meantime, and the oplog has rolled over",
		formatThousands(committed-before))
	return committed - before, nil
}

func (s *stage) oldestOplogEntry(ctx context.Context) (bson.Timestamp, error) {
	var oldest struct {
		TS bson.Timestamp `bson:"ts"`
	}
	oplog := s.client.Database("local").Collection("oplog.rs")
	first := options.FindOne().SetSort(bson.D{{Key: "$natural", Value: 1}})
	if err := oplog.FindOne(ctx, bson.D{}, first).Decode(&oldest); err != nil {
		return bson.Timestamp{}, fmt.Errorf("reading the oplog: %w", err)
	}
	return oldest.TS, nil
}

// openTransaction returns a transaction that has appended events and is not committed.
func (s *stage) openTransaction(ctx context.Context) (*slowAppend, error) {
	session, err := s.client.StartSession()
	if err != nil {
		return nil, fmt.Errorf("opening a slow transaction: %w", err)
	}

	slow := &slowAppend{s: s, session: session}
	if err = session.StartTransaction(); err == nil {
		err = slow.appendEvents(mongo.NewSessionContext(ctx, session), 2)
	}
	if err != nil {
		session.EndSession(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("opening a slow transaction: %w", err)
	}
	return slow, nil
}

// slowAppend is a transaction that stays open for a long time.
type slowAppend struct {
	s       *stage
	session *mongo.Session
	ids     []string
}

func (a *slowAppend) appendEvents(ctx context.Context, n int) error {
	var events []event.Event
	for range n {
		id := uuid.Must(uuid.NewV7())
		payload := fmt.Appendf(nil, `{"slow":%d}`, len(a.ids)+1)
		a.ids = append(a.ids, id.String())

		a.s.check.Begin(check.Event{
			ID:     id.String(),
			Key:    "slow",
			Topics: []string{a.s.names.topicName(aggregate)},
			Value:  payload,
		})
		events = append(events, event.New(event.Aggregate{Type: aggregate, ID: "slow"}, "OrderPlaced", event.Bytes("", payload), event.WithID(id)))
	}
	return a.s.service.box.Append(ctx, events...)
}

func (a *slowAppend) commitTransaction(ctx context.Context) error {
	if err := a.session.CommitTransaction(ctx); err != nil {
		return fmt.Errorf("committing a slow transaction: %w", err)
	}
	a.s.check.Committed(time.Now(), a.ids...)
	return nil
}

// awaitSweep blocks until the sweep has ended. It commits the slow transaction during the sweep.
func (s *stage) awaitSweep(ctx context.Context, slow *slowAppend, finding *HistoryFinding, began time.Time) error {
	isLogged := func(kind nodes.Kind) func() bool {
		return func() bool {
			n, err := s.countLogged(ctx, string(kind))
			return err == nil && n > 0
		}
	}

	if err := s.awaitCondition(ctx, "the gap is found", patience, isLogged(nodes.GapFound)); err != nil {
		return err
	}
	s.printEvent("the gap is found: sweeping the outbox")
	// The transaction has to commit while the sweep runs, so a part of the sweep comes first.
	_, before := s.check.Progress()
	err := s.awaitCondition(ctx, "the sweep delivers", patience, func() bool {
		_, delivered := s.check.Progress()
		return delivered > before+finding.Orphaned/10
	})
	if err != nil {
		return err
	}

	if err := slow.commitTransaction(ctx); err != nil {
		return err
	}
	s.printEvent("the slow transaction is committed")
	if err := s.awaitCondition(ctx, "the gap is closed", 2*patience, isLogged(nodes.GapClosed)); err != nil {
		return err
	}
	err = s.awaitCondition(ctx, "a lag below one second", patience, func() bool { return s.currentLag() < time.Second })
	if err != nil {
		return err
	}

	took := time.Since(began)
	finding.SweepS = roundSeconds(took)
	finding.SweepRate = float64(int(float64(finding.Orphaned) / took.Seconds()))
	finding.Gaps, err = s.countLogged(ctx, string(nodes.GapClosed))
	s.printEvent("the gap is closed")
	return err
}
