package config

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// form is an expression that each valid text of a key matches, for programs that check a configuration without loading it: editors and the
// chart. The validation also checks everything that an expression cannot.
type form struct {
	pattern  string
	expected string // the message about a text that does not match
}

// The expressions of which the validation uses the same.
const (
	nameForm     = `[A-Za-z0-9._-]{1,100}`
	prefixForm   = `[A-Za-z0-9_-]{1,60}`
	databaseForm = `[^/\\. "$*<>:|?\x00]{1,63}`
	// namespaceForm is database.collection, with * and ?.
	namespaceForm = `[^/\\. "$<>:|\x00]{1,63}\.[^$\x00\s]{1,200}`
	pathForm      = `(/[A-Za-z0-9._~-]*[A-Za-z0-9_~-])+`
)

// forms are the forms by the name in the tag of a field, or of its type.
var forms = map[string]form{
	"namespace": {namespaceForm, "expected database.collection; * and ? are allowed"},
	"name":      {nameForm, "expected letters, digits, dot, dash, underscore; at most 100"},
	"database":  {databaseForm, "expected the name of a database, without a pattern"},
	"prefix":    {prefixForm, "expected 1 to 60 letters, digits, _ or -, such as outrelay_"},
	"path":      {"(" + pathForm + ")?", PrefixRule},
	"mongodb":   {`(mongodb(\+srv)?://.+)?`, "expected mongodb://… or mongodb+srv://…"},
	"broker":    {`[^,@\s]+:(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5]?[0-9]{1,4})`, "expected host:port"},
	"topic":     {`[A-Za-z0-9._*?-]+`, "expected letters, digits, dot, dash, underscore; * and ? are allowed"},
	"task":      newWordForm(allTasks),
	"boolean":   {`1|t|T|TRUE|true|True|0|f|F|FALSE|false|False`, "expected true or false"},
	"number":    {`[-+]?[0-9]+`, "expected a whole number"},
	"http":      {`(https?://[^/].*)?`, "expected http://… or https://…"},
	"duration":  {`0|[0-9]+d|([0-9]+d)?([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+`, "expected a duration such as 250ms, 5s, 24h or 7d"},
	"size":      {`[0-9]+(\.[0-9]+)? *(B|kB|KB|MB|GB|KiB|MiB|GiB)?`, "expected a size such as 900KiB or 32MiB"},
	"start":     {`backlog|now|[0-9]{4}-[0-9]{2}-[0-9]{2}.*`, "expected backlog, now or a time such as 2026-11-20T08:00:00Z"},
}

// newWordForm returns the form of a key with these words.
func newWordForm(words []string) form {
	return form{strings.Join(words, "|"), "expected one of " + strings.Join(words, ", ")}
}

// formsOfTypes are the forms of the types that are parsed from one text.
var formsOfTypes = map[reflect.Type]string{durationType: "duration", sizeType: "size", startType: "start"}

// Range is the range of a duration in seconds, of a size in bytes or of a number.
type Range struct {
	Kind     string  `json:"kind"` // duration, size or number
	Low      float64 `json:"low"`
	High     float64 `json:"high"`
	Zero     bool    `json:"zero,omitempty"` // zero is valid too
	Expected string  `json:"expected"`
}

// Form has the checks of a key that a program can make without [Load]. It is for the chart, which can run no program.
type Form struct {
	Pattern  string `json:"pattern,omitempty"` // of the text, or of each text of a list; a text with a reference needs no match
	Expected string `json:"expected,omitempty"`
	Range    *Range `json:"range,omitempty"`
}

// Forms returns the checks by the path of the key. A range that depends on another key is the widest.
func Forms() map[string]Form {
	found := map[string]Form{}
	collectForms(reflect.TypeFor[Config](), "", found)

	c := Default()
	admin := DefaultAdmin()
	c.HTTP.Admin = &admin
	c.Limits.Record = maxRecord
	ranges := map[string]Range{}
	c.validateAll(validator{&Problems{}, ranges})
	for path, r := range ranges {
		form := found[path]
		form.Range = &r
		found[path] = form
	}
	return found
}

func collectForms(goType reflect.Type, prefix string, found map[string]Form) {
	for _, f := range fieldsOf(goType) {
		if section, ok := sectionType(f.typ); ok {
			collectForms(section, prefix+f.name+".", found)
			continue
		}

		form, ok := forms[f.form]
		switch {
		case f.enum != nil:
			form, ok = newWordForm(f.enum), true
		case f.typ.Kind() == reflect.Bool:
			form, ok = forms["boolean"], true
		case f.typ.Kind() == reflect.Int:
			form, ok = forms["number"], true
		}
		if ok {
			found[prefix+f.name] = Form{Pattern: "^(" + form.pattern + ")$", Expected: form.expected}
		}
	}
}

// allow records the range of the key at path, if the ranges are collected, and returns the text about values outside of it.
func (v validator) allow(path string, allowed Range) string {
	if v.ranges != nil {
		v.ranges[path] = allowed
	}
	return allowed.Expected
}

func (v validator) checkDuration(path string, duration, low, high time.Duration) {
	expected := v.allow(path, Range{Kind: "duration", Low: low.Seconds(), High: high.Seconds(), Expected: "expected between " + low.String() + " and " + high.String()})
	v.check(path, duration >= low && duration <= high, duration.String(), expected)
}

// checkRetention checks a time of which 0 has the meaning zero.
func (v validator) checkRetention(path string, retention time.Duration, zero string) {
	expected := v.allow(path, Range{
		Kind: "duration", Low: minRetention.Seconds(), High: math.MaxInt64, Zero: true, Expected: "expected at least " + minRetention.String() + ", or 0 " + zero,
	})
	v.check(path, retention == 0 || retention >= minRetention, retention.String(), expected)
}

func (v validator) checkSize(path string, size, low, high Size) {
	expected := v.allow(path, Range{Kind: "size", Low: float64(low), High: float64(high), Expected: "expected between " + low.String() + " and " + high.String()})
	v.check(path, size >= low && size <= high, size.String(), expected)
}

func (v validator) checkNumber(path string, n, low, high int) {
	expected := v.allow(path, Range{Kind: "number", Low: float64(low), High: float64(high), Expected: fmt.Sprintf("expected between %d and %d", low, high)})
	v.check(path, n >= low && n <= high, strconv.Itoa(n), expected)
}
