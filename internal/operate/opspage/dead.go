package opspage

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// dead is the data of the list of dead letters.
type dead struct {
	admin.Page[admin.DeadLetter]
	Groups   []admin.DeadGroup
	Empty    bool // the filter has no condition
	Requeued string

	OfHandlers bool
	Archived   bool // the letters are in the archive
}

// lettersPerPage is the default size of a page. It is small, because people read it on phones.
const lettersPerPage = 50

// maxSummarized bounds the entries of a list that also shows its groups: grouping reads them all.
const maxSummarized = 20_000

func showDead(call *call) (any, error) {
	filter, err := call.parseDeadFilter()
	if err != nil {
		return nil, err
	}

	page := dead{Empty: filter.Empty(), Requeued: filter.RequeueStatus, OfHandlers: filter.Source == admin.FromHandler, Archived: filter.Archived}
	limit := cmp.Or(call.pageLimit(), lettersPerPage)
	page.Page, err = call.use.Letters.List(call.ctx, filter, limit, call.value("after"))
	if err = call.ignoreFirstRun(err); err != nil {
		return nil, err
	}
	if page.Total > 0 && page.Total <= maxSummarized {
		if page.Groups, err = call.use.Letters.Summary(call.ctx, filter); err != nil {
			return nil, err
		}
	}
	return page, nil
}

// letter is one dead letter, with the initial values of the form that edits it.
type letter struct {
	admin.DeadLetter
	Fields  []field
	Payload string
	Shown   bool // the letter contains the payload
}

// GivenUpBy names the watcher, or the group and the handler, that gave the event up.
func (l letter) GivenUpBy() string {
	source := l.Source
	name := "watcher " + source.Watcher
	if source.Kind == admin.FromHandler {
		name = "handler " + source.Handler + " of group " + source.Group
	}
	if source.Node != "" {
		name += " on node " + source.Node
	}
	return name
}

// remedies are the next step of an operator for each class.
var remedies = map[string]string{
	"malformed":              "A required field is missing or has another type. Edit the field that the reason names, and fix the service that writes it.",
	"message_too_large":      "Raise max.message.bytes of the topic, then requeue it; or edit the payload.",
	"not_allowed":            "Allow the topic in topics.allow or by an ACL, then requeue it; or requeue it to another topic.",
	"partition_out_of_range": "Edit the partition, or add partitions to the topic; then requeue it.",
	"expired":                "Its time is over. Discard it; or edit its expiry if it is still needed.",
	"record_rejected":        "Kafka rejected the record. Fix the cause that the reason names, then requeue it.",
	"attempts_exhausted":     "Fix the cause of the last attempt, then requeue it.",
	"skipped":                "An operator gave it up. Requeue it when the cause is fixed.",
	"handler":                "Fix the handler or the system that it calls, and start the new version; then requeue it.",
	"rejected":               "The handler rejected the message for good. Edit it, or discard it.",
	"timeout":                "The handler took too long. Make it faster or its timeout longer; then requeue it.",
	"panic":                  "The handler panicked; the log of the service has the stack. Fix it and start the new version; then requeue it.",
	"unknown":                "No handler is registered for this type. Register one, or discard it.",
	"database":               "The database of the handler failed. Check it; then requeue it.",
}

// Remedy returns the next step of an operator for the class of the letter.
func (l letter) Remedy() string { return remedies[l.Class] }

// field is a field of an envelope that an edit may change.
type field struct {
	Name, Label, Value string
	Typed              string // the entered value, or Value
}

// editableMessage are the fields of the form for a letter of a handler.
var editableMessage = []field{{Name: "key", Label: "Key"}}

// editable are the fields of the form. An edit keeps all other fields.
var editable = []field{
	{Name: "type", Label: "Type"},
	{Name: "topic", Label: "Topic"},
	{Name: "partition", Label: "Partition"},
	{Name: "key", Label: "Key"},
	{Name: "aggregatetype", Label: "Aggregate type"},
	{Name: "aggregateid", Label: "Aggregate id"},
	{Name: "contenttype", Label: "Content type"},
	{Name: "subject", Label: "Subject"},
	{Name: "expiresAt", Label: "Expires at"},
}

func (c *call) parseLetterRef() (admin.DeadRef, error) {
	ref := admin.DeadRef{
		Collection: c.value("collection"), ID: c.q.Get("id"), Delivery: -1,
		Source: c.value("source"), Group: c.value("group"), Handler: c.value("handler"),
	}

	if text := c.value("delivery"); text != "" {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return ref, invalidInput("delivery: %q is not a number", text)
		}
		ref.Delivery = int(n)
	}

	if ref.ID == "" {
		return ref, invalidInput("the id of the dead letter is missing")
	}
	return ref, nil
}

func showLetter(call *call) (any, error) {
	ref, err := call.parseLetterRef()
	if err != nil {
		return nil, err
	}
	// Payloads are shown only to people who may see them, and only when they ask.
	withPayload := call.isSet("payload") && call.who.Payloads
	got, err := call.use.Letters.Show(call.ctx, ref, admin.Detail(withPayload))
	if err != nil {
		return nil, err
	}

	// If the envelope cannot be expressed as JSON, the fields of the form are empty.
	fields := editable
	if got.Source.Kind == admin.FromHandler {
		fields = editableMessage
	}
	page := letter{DeadLetter: got, Shown: withPayload, Fields: slices.Clone(fields)}
	var envelope map[string]json.RawMessage
	if json.Unmarshal(got.Envelope, &envelope) != nil {
		return page, nil
	}
	// For a letter of the relay, only the envelope has it.
	page.AggregateID = cmp.Or(page.AggregateID, formatValue(envelope["aggregateid"]))
	for i := range page.Fields {
		page.Fields[i].Value = formatValue(envelope[page.Fields[i].Name])
		page.Fields[i].Typed = page.Fields[i].Value
		if name := "set." + page.Fields[i].Name; call.v.Entered.Has(name) {
			page.Fields[i].Typed = call.v.Entered.Get(name)
		}
	}

	// The placeholder of a hidden value must not replace the value itself.
	if text := formatValue(envelope["payload"]); withPayload && !strings.Contains(text, "***") {
		page.Payload = text
	}
	return page, nil
}

// formatValue returns a value as people type it: a string without quotes, a time as RFC 3339, and
// any other value as JSON.
func formatValue(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}

	var text string
	if json.Unmarshal(raw, &text) == nil {
		return text
	}
	var date struct {
		At string `json:"$date"`
	}
	if json.Unmarshal(raw, &date) == nil && date.At != "" {
		return date.At
	}
	return formatJSON(raw)
}

// download serves all matching letters as lines of JSON, as a copy before they are discarded. The
// envelopes are included only on request, if the caller may see payloads.
func (p *page) download(response http.ResponseWriter, request *http.Request, call *call) {
	filter, err := call.parseDeadFilter()
	if err != nil {
		p.serveProblem(response, request, call, err)
		return
	}
	// The first page is read before the headers, because an error can still be a page then.
	page, err := call.use.Letters.List(call.ctx, filter, admin.MaxPage, "")
	if err != nil {
		p.serveProblem(response, request, call, err)
		return
	}

	name := "dead-" + call.v.Now.UTC().Format("20060102-150405") + ".ndjson"
	response.Header().Set("Content-Type", "application/x-ndjson")
	response.Header().Set("Content-Disposition", fmt.Sprintf("attachment; filename=%q", name))
	withPayload := call.isSet("payload") && call.who.Payloads
	out := json.NewEncoder(response)
	for {
		// A large number of letters is not collected in memory.
		for _, l := range page.Items {
			if withPayload {
				l, err = call.use.Letters.Show(call.ctx, admin.DeadRef{ID: l.Row, Delivery: -1}, admin.WithPayload)
				// The response has begun, so an error can only abort it.
				abortOn(err)
			}
			if out.Encode(l) != nil {
				return
			}
		}

		if page.Next == "" {
			return
		}
		page, err = call.use.Letters.List(call.ctx, filter, admin.MaxPage, page.Next)
		abortOn(err)
	}
}

// abortOn aborts the response if err is not nil, so that a client does not take an incomplete file
// for a complete one.
func abortOn(err error) {
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}
