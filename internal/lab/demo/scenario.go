package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// Scenario is a fault and the promise that holds in spite of it. `outrelay dev --scenario` shows it
// on real servers.
type Scenario struct {
	Name    string
	Promise string

	events      int           // default of Options.Events
	rate        int           // default of Options.Rate
	kill        time.Duration // default interval of kills; 0 if the scenario has none that can be configured
	ownServers  bool          // needs its own servers, because it breaks them or measures
	mongo       devstack.MongoOptions
	relayConfig map[string]any                                 // sections of the relays' configuration
	types       []string                                       // further aggregate types
	late        []string                                       // the same, but their topics are created later
	run         func(context.Context, *stage) (Finding, error) // returns a Finding even with an error
}

// Scenarios returns all scenarios, sorted by name.
func Scenarios() []Scenario {
	all := []Scenario{
		poisonScenario,
		historyScenario,
		dropScenario,
		scheduledScenario,
		retryScenario,
		consumerScenario,
	}
	slices.SortFunc(all, func(a, b Scenario) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// Kills reports whether Options.KillEvery and Options.RebalanceEvery apply to the scenario.
func (s *Scenario) Kills() bool { return s.kill > 0 }

// removedScenarios are former scenarios, with what shows the same promise.
var removedScenarios = map[string]string{
	"broker-outage": "scenario retry stops a topic; `go test ./test/fault -run TestKafkaAwayWithABacklog` stops Kafka",
	"saga":          "scenario consumer kills handlers; `go test ./test/fault -run TestSagaNodesDie` kills the nodes of sagas",
	"slots":         "`go test ./test/fault -run TestN28` shares, divides and kills slots",
	"purge":         "`go test ./test/fault -run TestPurgeWhileOwnersDie` purges under load",
}

// FindScenario returns the scenario with this name. If it does not exist, the error lists all
// scenarios, or names what has replaced it.
func FindScenario(name string) (Scenario, error) {
	all := Scenarios()
	if i := slices.IndexFunc(all, func(scenario Scenario) bool { return scenario.Name == name }); i >= 0 {
		return all[i], nil
	}

	if instead, removed := removedScenarios[name]; removed {
		return Scenario{}, fmt.Errorf("there is no scenario %q any more: %s", name, instead)
	}

	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	return Scenario{}, fmt.Errorf("there is no scenario %q; there are %s", name, strings.Join(names, ", "))
}

// Finding is the result of a scenario: an [Outcome] with further figures. As JSON it is one flat
// object.
type Finding interface {
	// Err returns nil if the promise held.
	Err() error
	commonOutcome() *Outcome
	// describeFigures returns the figures in words, as lines.
	describeFigures() []string
}

// Outcome contains the figures of all scenarios. Its JSON is the output of `outrelay dev --scenario
// NAME --json`.
type Outcome struct {
	Scenario   string   `json:"scenario"`
	Held       bool     `json:"held"`   // the promise held
	Events     int      `json:"events"` // committed, and to be delivered
	Delivered  int      `json:"delivered"`
	Lost       int      `json:"lost"`
	Duplicates int      `json:"duplicates"`   // further records of an event, without the redelivered header
	OutOfOrder int      `json:"out_of_order"` // first records after a later event of their key, or in another partition
	Phantoms   int      `json:"phantoms"`     // records that must not exist, or differ from the appended event
	Dead       int      `json:"dead"`         // dead letters
	Seconds    float64  `json:"seconds"`      // duration without the start of the servers
	Broken     []string `json:"broken"`       // broken promises in words
}

func (o *Outcome) commonOutcome() *Outcome { return o }

// Err returns nil if the promise held.
func (o *Outcome) Err() error {
	if len(o.Broken) == 0 {
		return nil
	}
	return fmt.Errorf("scenario %s: the promise did not hold: %s", o.Scenario, strings.Join(o.Broken, "; "))
}

// FormatFinding returns a finding in words.
func FormatFinding(scenario Scenario, finding Finding) string {
	outcome := finding.commonOutcome()
	verdict := "held"
	if !outcome.Held {
		verdict = "DID NOT HOLD"
	}

	lines := []string{
		fmt.Sprintf("scenario %s: the promise %s", scenario.Name, verdict),
		"  promise           " + scenario.Promise,
		fmt.Sprintf("  events            %s committed, %s delivered · lost %d · duplicate %d · out of order %d"+
			" · phantom %d · dead %s",
			formatThousands(outcome.Events), formatThousands(outcome.Delivered), outcome.Lost, outcome.Duplicates, outcome.OutOfOrder,
			outcome.Phantoms, formatThousands(outcome.Dead)),
	}
	for _, l := range finding.describeFigures() {
		lines = append(lines, "  "+l)
	}
	for _, b := range outcome.Broken {
		lines = append(lines, "  broken            "+b)
	}
	lines = append(lines, fmt.Sprintf("  took              %.1f s", outcome.Seconds))
	return strings.Join(lines, "\n")
}

// brokenPromise is an error that becomes part of the Finding: the relay broke a promise.
type brokenPromise struct{ why string }

func (b *brokenPromise) Error() string { return b.why }

// RunScenario runs a scenario and returns its result. It returns an error if the environment fails,
// for example if the servers or a relay cannot be started. A broken promise is in the Finding.
// RunScenario ignores Keep and reads no keys. The intervals of kills and rebalances apply only if
// [Scenario.Kills] returns true.
func RunScenario(ctx context.Context, scenario Scenario, options Options) (Finding, error) {
	// The options override the scenario, except for a fault that it does not have.
	options.Events = cmp.Or(options.Events, scenario.events)
	options.Rate = cmp.Or(options.Rate, scenario.rate)
	if options.RebalanceEvery == 0 {
		options.KillEvery = cmp.Or(options.KillEvery, scenario.kill)
	}
	demo := newDemo(options)
	demo.relayConfig = scenario.relayConfig
	demo.allowFlagged = true
	defer options.Terminal.Restore()
	defer demo.view.finishStatus()

	demo.view.printLine("outrelay dev · scenario %s: %s", scenario.Name, scenario.Promise)
	err := demo.startServers(ctx, devstack.Options{Mongods: 1, Brokers: 1, Env: !scenario.ownServers, Mongo: scenario.mongo})
	if err != nil {
		return nil, err
	}
	defer demo.stack.Stop()
	if err := demo.connectClients(); err != nil {
		return nil, err
	}
	defer demo.closeClients(ctx)

	st := newStage(demo, scenario)
	if err := st.createTopics(ctx); err != nil {
		return nil, err
	}
	began := time.Now()
	finding, err := st.playScenario(ctx)
	var broken *brokenPromise
	if errors.As(err, &broken) {
		st.recordBroken("%s", broken.why)
	} else if err != nil {
		return nil, err
	}

	// The outcome is complete although the promise is broken.
	err = st.completeOutcome(ctx, finding.commonOutcome(), time.Since(began))
	demo.broken = finding.Err() != nil
	return finding, err
}
