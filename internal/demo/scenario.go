package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/devstack"
)

// Scenario is a fault and the promise that holds in spite of it, shown on real servers by `outrelay dev --scenario`.
type Scenario struct {
	Name    string
	Promise string

	events int           // how much of it there is, unless Options.Events says otherwise
	rate   int           // of the load, unless Options.Rate says otherwise
	kill   time.Duration // the rhythm of its kills, unless Options say otherwise; 0 where they cannot
	own    bool          // never plays on servers that the environment names: it breaks them, or measures
	mongo  devstack.MongoOptions
	set    map[string]any                                 // sections of the relays' configuration
	types  []string                                       // aggregate types beside that of the demo
	late   []string                                       // likewise; their topics come to be later
	run    func(context.Context, *stage) (Finding, error) // a Finding even with an error
}

// Scenarios are all that there are, by name.
func Scenarios() []Scenario {
	all := []Scenario{poisonScenario, outageScenario, historyScenario, dropScenario, scheduledScenario, retryScenario, purgeScenario, consumerScenario, sagaScenario, slotsScenario}
	slices.SortFunc(all, func(a, b Scenario) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// Kills reports whether the rhythm of its faults can be chosen, by Options.KillEvery and Options.RebalanceEvery.
func (s *Scenario) Kills() bool { return s.kill > 0 }

// FindScenario is the one of that name; the error of a name that there is not lists those that there are.
func FindScenario(name string) (Scenario, error) {
	all := Scenarios()
	if i := slices.IndexFunc(all, func(s Scenario) bool { return s.Name == name }); i >= 0 {
		return all[i], nil
	}
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	return Scenario{}, fmt.Errorf("there is no scenario %q; there are %s", name, strings.Join(names, ", "))
}

// Finding is what a scenario found: an [Outcome] with figures of its own. As JSON it is one flat object.
type Finding interface {
	// Err is nil if the promise held.
	Err() error
	common() *Outcome
	// tell is the figures in words, one thing to a line.
	tell() []string
}

// Outcome is what all scenarios have in common. Its names are those of `outrelay dev --scenario NAME --json`.
type Outcome struct {
	Scenario   string   `json:"scenario"`
	Held       bool     `json:"held"`   // the promise held
	Events     int      `json:"events"` // committed, and to be delivered
	Delivered  int      `json:"delivered"`
	Lost       int      `json:"lost"`
	Duplicates int      `json:"duplicates"`   // records of an event that was seen before, and not flagged as such
	OutOfOrder int      `json:"out_of_order"` // first records behind one of a later event of their key, or in another partition
	Phantoms   int      `json:"phantoms"`     // records that must not be there, or differ from what was appended
	Dead       int      `json:"dead"`         // dead letters
	Seconds    float64  `json:"seconds"`      // of the scenario, without the start of the servers
	Broken     []string `json:"broken"`       // what was not as promised, in words
}

func (o *Outcome) common() *Outcome { return o }

// Err is nil if the promise held.
func (o *Outcome) Err() error {
	if len(o.Broken) == 0 {
		return nil
	}
	return fmt.Errorf("scenario %s: the promise did not hold: %s", o.Scenario, strings.Join(o.Broken, "; "))
}

// Account is a finding in words, for people.
func Account(s Scenario, f Finding) string {
	o := f.common()
	verdict := "held"
	if !o.Held {
		verdict = "DID NOT HOLD"
	}
	lines := []string{
		fmt.Sprintf("scenario %s: the promise %s", s.Name, verdict),
		"  promise           " + s.Promise,
		fmt.Sprintf("  events            %s committed, %s delivered · lost %d · duplicate %d · out of order %d · phantom %d · dead %s",
			thousands(o.Events), thousands(o.Delivered), o.Lost, o.Duplicates, o.OutOfOrder, o.Phantoms, thousands(o.Dead)),
	}
	for _, l := range f.tell() {
		lines = append(lines, "  "+l)
	}
	for _, b := range o.Broken {
		lines = append(lines, "  broken            "+b)
	}
	return strings.Join(append(lines, fmt.Sprintf("  took              %.1f s", o.Seconds)), "\n")
}

// brokenPromise is an error that is a finding: something that was promised did not come about.
type brokenPromise struct{ why string }

func (b *brokenPromise) Error() string { return b.why }

// RunScenario runs one and returns what it found. An error is one of the surroundings: servers that cannot be had, a relay
// that does not start; a broken promise is in the Finding. Of the Options it takes neither keys nor Keep,
// and a rhythm of kills or rebalances only where [Scenario.Kills] says so.
func RunScenario(ctx context.Context, s Scenario, o Options) (Finding, error) {
	o.Events, o.Rate = cmp.Or(o.Events, s.events), cmp.Or(o.Rate, s.rate)
	if o.RebalanceEvery == 0 {
		o.KillEvery = cmp.Or(o.KillEvery, s.kill)
	}
	d := newDemo(o)
	d.set, d.flagged = s.set, true
	defer o.Terminal.Restore()
	defer d.v.done()
	d.v.line("outrelay dev · scenario %s: %s", s.Name, s.Promise)
	if err := d.boot(ctx, devstack.Options{Mongods: 1, Brokers: 1, Env: !s.own, Mongo: s.mongo}); err != nil {
		return nil, err
	}
	defer d.stack.Stop()
	if err := d.connect(ctx); err != nil {
		return nil, err
	}
	defer d.disconnect(ctx)
	st := newStage(d, s)
	if err := st.prepare(ctx); err != nil {
		return nil, err
	}
	began := time.Now()
	f, err := st.play(ctx)
	var broken *brokenPromise
	if errors.As(err, &broken) {
		st.broke("%s", broken.why)
	} else if err != nil {
		return nil, err
	}
	err = st.judge(ctx, f.common(), time.Since(began))
	d.broken = f.Err() != nil
	return f, err
}
