package opspage

import (
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// filter is the form that selects the entries of a list.
type filter struct {
	Path, Label, Button string
	Fields              []input
	More                []input // conditions that are rarely set
}

// input is one field of a form.
type input struct {
	Name, Label string
	Kind        inputKind
	Hint        string
	Options     []option // of a select
}

// inputKind is the kind of an input. The zero kind is a line of text.
type inputKind string

const (
	inputSelect inputKind = "select"
	inputTime   inputKind = "time" // a date and a time of day
	inputHidden inputKind = "hidden"
)

// option is one choice of a select.
type option struct{ Value, Label string }

// HasMore reports whether a condition that is rarely set is set.
func (f *filter) HasMore(view *view) bool {
	return slices.ContainsFunc(f.More, func(input input) bool { return view.Asked(input.Name) != "" })
}

// IsSet reports whether any condition is set.
func (f *filter) IsSet(view *view) bool {
	isSet := func(input input) bool { return view.Asked(input.Name) != "" }
	return slices.ContainsFunc(f.Fields, isSet) || f.HasMore(view)
}

// Choices returns the options of a select. A value that the address contains is always a choice.
func (in input) Choices(view *view) []option {
	value := view.Asked(in.Name)
	if value == "" || slices.ContainsFunc(in.Options, func(option option) bool { return option.Value == value }) {
		return in.Options
	}
	return append(slices.Clone(in.Options), option{value, value})
}

// Inputs for conditions that several lists have.
var (
	collectionInput = input{Name: "collection", Label: "Collection", Hint: "database.collection"}
	eventIDInput    = input{Name: "id", Label: "Event id"}
)

// sinceInput returns the input of a time range that ends now.
func sinceInput(label string) input {
	return input{Name: "since", Label: label, Kind: inputSelect, Options: []option{
		{"", "any time"}, {"15m", "last 15 min"}, {"1h", "last hour"}, {"6h", "last 6 h"}, {"24h", "last 24 h"}, {"7d", "last 7 days"},
	}}
}

// rangeInputs returns the inputs of a time range.
func rangeInputs(start, end string) []input {
	return []input{{Name: "from", Label: start, Kind: inputTime}, {Name: "to", Label: end, Kind: inputTime}}
}

// selectOf returns a select of these values, after one for any value.
func selectOf(name, label string, values []string) input {
	in := input{Name: name, Label: label, Kind: inputSelect, Options: []option{{"", "any"}}}
	for _, v := range values {
		in.Options = append(in.Options, option{v, v})
	}
	return in
}

func filterDead(call *call) *filter {
	filter := &filter{Path: "/dead", Label: "Filter dead letters", Button: "Filter"}
	// The letters of handlers have other classes, and belong to a group.
	ofHandlers := call.value("source") == admin.FromHandler
	var classes []string
	switch call.value("source") {
	case admin.FromRelay:
		classes = admin.Classes()
	case admin.FromHandler:
		classes = admin.HandlerClasses()
	default:
		// Both have some classes.
		classes = slices.Compact(slices.Sorted(slices.Values(slices.Concat(admin.Classes(), admin.HandlerClasses()))))
	}

	filter.Fields = []input{
		{Name: "fingerprint", Kind: inputHidden},
		{Name: "source", Label: "Given up by", Kind: inputSelect, Options: []option{{"", "anyone"}, {admin.FromRelay, "relay"}, {admin.FromHandler, "handlers"}}},
		{Name: "topic", Label: "Topic"},
		{Name: "key", Label: "Ordering key"},
		selectOf("class", "Class", classes),
		sinceInput("Died in the"),
		{Name: "requeued", Label: "State", Kind: inputSelect, Options: []option{{"", "not requeued"}, {"true", "requeued"}, {"any", "any"}, {inArchive, "discarded, in the archive"}}},
	}
	filter.More = append([]input{{Name: "type", Label: "Type"}}, rangeInputs("Died from", "Died before")...)
	if ofHandlers {
		filter.More = append(filter.More, input{Name: "group", Label: "Consumer group"}, input{Name: "handler", Label: "Handler"})
	}
	filter.More = append(filter.More,
		input{Name: "message", Label: "Reason begins with"}, input{Name: "aggregate", Label: "Aggregate type"}, collectionInput, eventIDInput)
	return filter
}

func filterWaiting(*call) *filter {
	return &filter{Path: "/waiting", Label: "Filter waiting events", Button: "Filter", Fields: []input{
		{Name: "topic", Label: "Topic"},
		{Name: "key", Label: "Ordering key"},
		selectOf("reason", "State", []string{"retry", "blocked", "parked", "queued"}),
		collectionInput,
	}}
}

func filterRecent(*call) *filter {
	return &filter{Path: "/topics/recent", Label: "Filter recent events", Button: "Filter", Fields: []input{{Name: "topic", Label: "Topic"}}}
}

func filterScheduled(*call) *filter {
	return &filter{
		Path: "/scheduled", Label: "Filter scheduled events", Button: "Filter",
		Fields: []input{{Name: "type", Label: "Type"}, {Name: "aggregate", Label: "Aggregate type"}},
		More:   append(rangeInputs("Due from", "Due before"), collectionInput, eventIDInput),
	}
}

func filterLog(*call) *filter {
	kinds := selectOf("kind", "Kind", admin.AuditKinds())
	return &filter{
		Path: "/log", Label: "Filter the audit log", Button: "Filter",
		Fields: []input{kinds, {Name: "of", Label: "Watcher"}, {Name: "node", Label: "Node"}, {Name: "actor", Label: "Actor"}, sinceInput("In the")},
		More:   rangeInputs("From", "Before"),
	}
}

func filterLookup(*call) *filter {
	return &filter{
		Path: "/lookup", Label: "Look up an event", Button: "Look up",
		Fields: []input{
			{Name: "q", Label: "Event id or ordering key"},
			{Name: "by", Label: "Search for", Kind: inputSelect, Options: []option{{"", "an id, then a key"}, {"id", "an event id"}, {"key", "an ordering key"}}},
		},
		More: append(rangeInputs("Written from", "Written before"), collectionInput),
	}
}

// filterSagas returns the form that opens an instance of the shown saga.
func filterSagas(call *call) *filter {
	if call.value("saga") == "" {
		return nil
	}
	return &filter{Path: "/sagas", Label: "Open a saga", Button: "Open", Fields: []input{
		{Name: "database", Kind: inputHidden}, {Name: "saga", Kind: inputHidden}, {Name: "id", Label: "Saga id"},
	}}
}

// formatInput returns the time of a value of the address in the format of an input for times, in
// UTC, or "" if it is not a time.
func formatInput(text string) string {
	at, ok := parseInstant(text)
	switch {
	case !ok:
		return ""
	case at.Second() != 0:
		return at.UTC().Format("2006-01-02T15:04:05")
	}
	return at.UTC().Format("2006-01-02T15:04")
}

// parseInstant parses a time in one of the supported formats.
func parseInstant(text string) (time.Time, bool) {
	for _, layout := range timeLayouts {
		if moment, err := time.Parse(layout, text); err == nil {
			return moment, true
		}
	}
	return time.Time{}, false
}
