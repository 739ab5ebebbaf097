package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/kafka"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/store"
)

// Reslice asks for another number of slots of the configured watcher.
type Reslice struct {
	Slots  int
	DryRun bool
	Wait   time.Duration // for the owners to drain and release
	Actor  string
	Say    func(text string) // hears of each step; nil for nobody
}

// ResliceReport is the answer of `outrelay reslice --json`.
type ResliceReport struct {
	Watcher string        `json:"watcher"`
	From    int           `json:"from"` // slots; 0 for a watcher that has never run
	To      int           `json:"to"`
	DryRun  bool          `json:"dry_run"`
	Done    bool          `json:"done"`
	Slots   []ResliceSlot `json:"slots"` // as they were
	New     []NewSlot     `json:"new"`   // with what was asked of the old ones
	// Unpinned are the old slots whose pin some new slot that has keys of theirs could not keep.
	Unpinned []string `json:"unpinned"`
}

// NewSlot is a slot that takes the place of others.
type NewSlot struct {
	Slot   string `json:"slot"`
	Paused bool   `json:"paused"`
	Pin    string `json:"pin,omitempty"`
}

// ResliceSlot is a slot that is replaced.
type ResliceSlot struct {
	Slot     string     `json:"slot"`
	Owner    string     `json:"owner"` // "" if nobody runs it
	Position *time.Time `json:"position,omitempty"`
}

// ErrResliced is what a refusal of a division anew is: nothing was changed.
var ErrResliced = errors.New("the slots stay as they are")

func refusalf(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrResliced, fmt.Errorf(format, args...))
}

// resliceRun is one division anew (N28). Its order: every slot is paused and its owner drains and releases; every lease is
// acquired, so that the documents are what they say; every transactional id is fenced, as at a take-over, so that nothing of an
// old slot can come to a topic behind what was read; one transaction puts the new documents in the place of the old ones.
// Before that transaction everything is as it was, but paused, and a repetition begins anew; behind it, all is done.
type resliceRun struct {
	Reslice
	cfg       config.Config
	log       *slog.Logger
	mongo     *clients
	kafka     *kafka.Client
	state     *mongo.Database
	watchers  *mongo.Collection
	divisions *store.Divisions

	ids    []string
	paused []string // by an operator, before
	held   []*lease.Held
	orders slotOrders // to the new slots
}

// RunReslice divides the watcher anew. Whatever ends it early, the slots are what they were and go on.
func RunReslice(ctx context.Context, cfg config.Config, log *slog.Logger, want Reslice) (ResliceReport, error) {
	r := &resliceRun{Reslice: want, cfg: cfg, log: log}
	if r.Say == nil {
		r.Say = func(string) {}
	}
	var err error
	if r.mongo, err = newClients(cfg.MongoDB, cfg.Node, slot.Most, log, nil); err != nil {
		return ResliceReport{}, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		r.mongo.disconnect(ctx)
	}()
	if r.kafka, err = NewKafka(cfg, log, metrics.New("")); err != nil {
		return ResliceReport{}, err
	}
	defer r.kafka.Close()
	r.state = r.mongo.state.Database(cfg.MongoDB.State)
	r.watchers, r.divisions = store.Majority(r.state.Collection("watchers")), store.NewDivisions(r.state)
	rep, err := r.planReslice(ctx)
	if err != nil || want.DryRun || rep.Done {
		return rep, err
	}
	if len(r.ids) == 0 {
		err = r.saveFirstDivision(ctx)
		rep.Done = err == nil
		return rep, err
	}
	if err := r.replaceSlots(ctx, rep.From); err != nil {
		return rep, err
	}
	rep.Done = true
	r.orders.addTo(&rep)
	err = store.NewEvents(r.state.Collection("events"), cfg.Watcher, "").Append(ctx, "resliced", bson.D{
		{Key: "from", Value: rep.From}, {Key: "to", Value: rep.To}, {Key: "actor", Value: want.Actor},
	})
	if err != nil {
		err = fmt.Errorf("done, but not written to the events log: %w", err)
	}
	return rep, err
}

// saveFirstDivision notes the number of slots of a watcher that has never run. A process that begins at that very moment sees the new number
// when it has made its document, and gives it up; or it has looked before, and then its document is there by now, and its number stays.
func (r *resliceRun) saveFirstDivision(ctx context.Context) error {
	r.Say("noting " + pluralize(r.Slots, "slot"))
	if err := r.divisions.Divide(ctx, r.cfg.Watcher, r.Slots, false); err != nil {
		return err
	}
	has, err := r.divisions.Documents(ctx, r.cfg.Watcher)
	if err != nil || has == 0 || has == r.Slots {
		return err
	}
	if err := r.divisions.Divide(ctx, r.cfg.Watcher, has, false); err != nil {
		return err
	}
	return refusalf("watcher %s was started with %s at this moment; divide it anew once it runs", r.cfg.Watcher, pluralize(has, "slot"))
}

// planReslice looks at what is there.
func (r *resliceRun) planReslice(ctx context.Context) (ResliceReport, error) {
	rep := ResliceReport{Watcher: r.cfg.Watcher, To: r.Slots, DryRun: r.DryRun, Slots: []ResliceSlot{}, New: []NewSlot{}, Unpinned: []string{}}
	if r.Slots < 1 || r.Slots > slot.Most {
		return rep, refusalf("%d slots are asked for; from 1 to %d are possible", r.Slots, slot.Most)
	}
	v, err := r.divisions.Read(ctx, r.cfg.Watcher)
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		return rep, err
	}
	if r.ids, err = r.divisions.IDs(ctx, r.cfg.Watcher); err != nil {
		return rep, err
	}
	rep.From = v.Of
	if v.Of == 0 && len(r.ids) > 0 {
		_, p, _ := slot.ParseID(r.ids[0])
		rep.From = p.N
	}
	if rep.From == r.Slots {
		rep.Done = true
		return rep, nil
	}
	if len(r.ids) == 0 {
		return rep, nil
	}
	var want []string
	for _, p := range slot.Parts(rep.From) {
		want = append(want, p.ID(r.cfg.Watcher))
	}
	if !slices.Equal(r.ids, want) {
		return rep, refusalf("watcher %s has %d slots and the documents %s: start outrelay run once, or if one was lost run outrelay recover", r.cfg.Watcher, rep.From, strings.Join(r.ids, ", "))
	}
	if v.Paused != nil {
		r.paused = *v.Paused
	}
	var old []lease.Document
	for _, id := range r.ids {
		d, now, err := lease.Read(ctx, r.watchers, id)
		if err != nil {
			return rep, err
		}
		old = append(old, d)
		if err := r.checkReplaceable(&d); err != nil {
			return rep, err
		}
		one := ResliceSlot{Slot: id[len(r.cfg.Watcher)+1:]}
		if d.Owner != "" && d.ExpiresAt.After(now) {
			one.Owner = d.Node
		}
		if at, ok := d.Position().Time(); ok {
			t := time.Unix(int64(at.T), 0).UTC()
			one.Position = &t
		}
		if d.Control.Paused && v.Paused == nil {
			r.paused = append(r.paused, id)
		}
		rep.Slots = append(rep.Slots, one)
	}
	r.inheritOrders(old).addTo(&rep)
	return rep, nil
}

// checkReplaceable reports what keeps a slot from being replaced.
func (r *resliceRun) checkReplaceable(d *lease.Document) error {
	switch {
	case d.Position().IsZero():
		return refusalf("slot %s has no position yet; let it run first", d.ID)
	case d.Gap != nil:
		return refusalf("slot %s sweeps a stretch of its stream that was lost; let it finish first", d.ID)
	}
	return nil
}

func (r *resliceRun) replaceSlots(ctx context.Context, from int) (err error) {
	if r.paused == nil {
		r.paused = []string{}
	}
	if err := r.divisions.Mark(ctx, r.cfg.Watcher, from, r.paused); err != nil {
		return err
	}
	renew, stop := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	done := false
	defer func() {
		stop()
		renewing.Wait()
		if !done {
			r.restoreSlots(ctx)
		}
	}()
	old, err := r.acquireAll(ctx, func(h *lease.Held) {
		renewing.Go(func() { _ = h.Run(renew) }) // what it ends with, the transaction meets too
	})
	if err != nil {
		return err
	}
	r.Say("fencing what the slots have sent with")
	senders, err := r.fenceAll(ctx, old)
	if err != nil {
		return err
	}
	crash.At("reslice-fenced")
	fresh, err := r.newDocuments(ctx, old, senders)
	if err != nil {
		return err
	}
	// The leases last for a while without being renewed; a renewal would only meet the transaction.
	stop()
	renewing.Wait()
	r.Say("writing " + pluralize(r.Slots, "new document"))
	if err := r.replaceDocuments(ctx, old, fresh); err != nil {
		return err
	}
	done = true
	crash.At("reslice-done")
	return nil
}

// acquireAll pauses every slot, waits until its owner has released it, and acquires it. It returns the documents.
func (r *resliceRun) acquireAll(ctx context.Context, keep func(*lease.Held)) ([]lease.Document, error) {
	r.Say("pausing " + pluralize(len(r.ids), "slot"))
	for _, id := range r.ids {
		if err := r.pauseSlot(ctx, id); err != nil {
			return nil, err
		}
	}
	crash.At("reslice-paused")
	if err := r.waitForRelease(ctx); err != nil {
		return nil, err
	}
	old := make([]lease.Document, len(r.ids))
	for i, id := range r.ids {
		h, err := r.acquireSlot(ctx, id)
		if err != nil {
			return nil, err
		}
		r.held = append(r.held, h)
		keep(h)
		old[i] = h.Document()
		if err := r.checkReplaceable(&old[i]); err != nil {
			return nil, err
		}
	}
	return old, nil
}

// newDocuments makes the new documents. Each has a transactional id of its own, which its first owner takes from us: that one has to
// read a marker above the last sender of its list, and can write none for the ids of others (N4).
func (r *resliceRun) newDocuments(ctx context.Context, old []lease.Document, senders []record.Sender) ([]lease.Document, error) {
	parts := slot.Parts(r.Slots)
	ids := make([]string, len(parts))
	for i, p := range parts {
		ids[i] = p.ID(r.cfg.Watcher)
	}
	docs := lease.Merge(ids, old, senders, func(d lease.Document) string { return positionKey(d.Position()) })
	for i := range docs {
		s, err := r.kafka.Introduce(ctx, transactionalID(&docs[i], r.cfg.Watcher, parts[i]))
		if err != nil {
			return nil, err
		}
		docs[i].Introduced(s)
	}
	return docs, nil
}

func pluralize(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// pauseTimeout bounds an attempt to pause a slot.
const pauseTimeout = 2 * time.Second

// pauseSlot waits out an owner that was killed within a transaction of its own: it holds the document until it is ended.
func (r *resliceRun) pauseSlot(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	for {
		call, stop := context.WithTimeout(ctx, pauseTimeout)
		err := lease.Pause(call, r.watchers, id)
		stop()
		if err == nil || !mongo.IsTimeout(err) && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		if ctx.Err() != nil {
			return refusalf("slot %s cannot be paused: %w", id, err)
		}
		if err := lease.EndTransactions(ctx, r.watchers, id); err != nil {
			r.log.Debug("cannot end the last owner's session", "slot", id, "reason", err)
		}
	}
}

// waitForRelease waits until nobody owns a slot any more.
func (r *resliceRun) waitForRelease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	for {
		var owners []string
		for _, id := range r.ids {
			d, now, err := lease.Read(ctx, r.watchers, id)
			if err != nil {
				owners = append(owners, "unknown: "+err.Error())
			} else if d.Owner != "" && d.ExpiresAt.After(now) {
				owners = append(owners, d.Node+" has "+id)
			}
		}
		if len(owners) == 0 {
			return nil
		}
		if retry.Sleep(ctx, 100*time.Millisecond) != nil {
			return refusalf("owners did not drain and release within %s (%s): wait until their targets can be written, or stop them, and try again", r.Wait, strings.Join(owners, ", "))
		}
	}
}

func (r *resliceRun) acquireSlot(ctx context.Context, id string) (*lease.Held, error) {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	l, err := lease.New(lease.Config{
		Collection: r.watchers, ID: id, Node: "reslice-" + r.cfg.Node, Address: r.cfg.Address, TTL: max(r.cfg.Lease.TTL, 3*time.Second),
		Log: r.log, Paused: true,
	})
	if err != nil {
		return nil, err
	}
	h, err := l.Acquire(ctx)
	if err != nil {
		return nil, refusalf("slot %s could not be acquired: %w", id, err)
	}
	return h, nil
}

// fenceAll retires every transactional id, each under its lease, and collects what the new slots have to count in their
// read-backs.
func (r *resliceRun) fenceAll(ctx context.Context, old []lease.Document) ([]record.Sender, error) {
	ctx, cancel := context.WithTimeout(ctx, r.Wait)
	defer cancel()
	var all []record.Sender
	for i := range old {
		d := &old[i]
		_, p, _ := slot.ParseID(d.ID)
		senders, err := kafka.FenceOff(ctx, r.kafka, kafka.TakeOver{
			TransactionalID: transactionalID(d, r.cfg.Watcher, p), Generation: d.Generation, Offsets: d.OffsetMap(), Senders: d.Senders(),
			Gate:   r.held[i].Valid,
			Bounds: fence.Bounds{Bytes: int64(r.cfg.Kafka.ReadBack.Bytes), Time: r.cfg.Kafka.ReadBack.Time},
			Alive:  d.RenewedAt,
		})
		if err != nil {
			return nil, refusalf("slot %s: %w", d.ID, err)
		}
		all = append(all, senders...)
	}
	return all, nil
}

// transactionalID is that of a slot, without its generation. N5
func transactionalID(d *lease.Document, watcher string, p slot.Part) string {
	return fmt.Sprintf("outrelay.%s.%s.%s", d.Instance, watcher, p)
}

// replaceDocuments is the transaction. One whose outcome is not known is looked up.
func (r *resliceRun) replaceDocuments(ctx context.Context, old, fresh []lease.Document) error {
	s, err := r.mongo.state.StartSession()
	if err != nil {
		return fmt.Errorf("starting session: %w", err)
	}
	defer s.EndSession(context.WithoutCancel(ctx))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.Wait) // not to be left in the middle
	defer cancel()
	_, err = s.WithTransaction(ctx, func(tx context.Context) (any, error) {
		db := s.Client().Database(r.cfg.MongoDB.State)
		if err := lease.Replace(tx, db.Collection("watchers"), old, fresh, func(id string, now []lease.Document) lease.Control {
			r.orders = r.inheritOrders(now)
			return r.orders.controls[id]
		}); err != nil {
			return nil, err
		}
		return nil, store.NewDivisionsIn(db).Divide(tx, r.cfg.Watcher, r.Slots, true)
	}, options.Transaction().SetReadConcern(readconcern.Majority()).SetWriteConcern(writeconcern.Majority()))
	if err == nil {
		return nil
	}
	if v, e := r.divisions.Read(ctx, r.cfg.Watcher); e == nil && v.Of == r.Slots {
		return nil
	}
	return fmt.Errorf("putting the new watcher documents in the place of the old ones: %w", err)
}

// restoreSlots lets the slots go on as they were.
func (r *resliceRun) restoreSlots(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	for _, h := range r.held {
		if err := h.Release(ctx, lease.Checkpoint{}); err != nil {
			r.log.Warn("a lease expires by itself", "reason", err)
		}
	}
	for _, id := range r.ids {
		if slices.Contains(r.paused, id) {
			continue
		}
		if err := lease.Resume(ctx, r.watchers, id); err != nil {
			r.log.Error("a slot stays paused; run `outrelay resume`", "slot", id, "reason", err)
		}
	}
	if err := r.divisions.Unmark(ctx, r.cfg.Watcher); err != nil {
		r.log.Warn("the division anew stays noted as under way", "reason", err)
	}
}
