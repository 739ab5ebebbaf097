package opspage

import (
	"cmp"
	"strconv"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// deadOptions returns the options of a requeue. The box "late" also selects expired events. The field "to" names the handlers
// that get the messages, and "to-topic" the topic that gets the events.
func (c *call) deadOptions(dryRun bool) admin.DeadOptions {
	return admin.DeadOptions{
		DryRun: dryRun, IgnoreExpiry: c.isSet("late"), Handlers: strings.Fields(c.value("to")), Topic: c.value("to-topic"),
	}
}

func planRequeue(call *call) (preview, error) {
	filter, err := call.selectLetters()
	if err != nil {
		return preview{}, err
	}
	// The plan is a dry run of the action itself, so both reject the same letters.
	out, err := call.use.Letters.Requeue(call.ctx, filter, call.deadOptions(true), nil)
	if err != nil {
		return preview{}, err
	}

	// Rejected letters stay as they are, so neither the text nor the button counts them.
	requeued := out.Matched - out.Rejected
	preview := preview{
		run:     func() (notice, error) { return call.requeueLetters(filter) },
		Count:   requeued,
		Nothing: requeued == 0,
		Lines:   []string{countVerb(requeued, "dead letter") + " sent at once, to the topics that the routing chooses now."},
		Undo: "It cannot be taken back: the events are sent again, each as the next delivery of the same event. " +
			"The dead letters stay in the list as requeued.",
	}
	if topic := call.value("to-topic"); topic != "" {
		preview.Lines[0] = countVerb(requeued, "dead letter") + " sent at once, to topic " + topic + " only."
		if filter.Source == "" {
			preview.Lines[0] += " Letters of handlers are left alone."
		}
	}
	if filter.Source == admin.FromHandler {
		preview.Lines[0] = countVerb(requeued, "message") + " handed back to the handlers at once."
		preview.Undo = "It cannot be taken back: the handlers get the messages again. The dead letters stay in the list as requeued."
	}
	if out.Rejected > 0 {
		preview.Lines = append(preview.Lines, countVerb(out.Rejected, "dead letter")+" not deliverable in this form and left alone:")
		for _, w := range out.Why {
			preview.Rows = append(preview.Rows, row{w.ID + " in " + w.Collection, w.Reason})
		}
	}
	if filter.All && filter.Empty() {
		preview.Lines = append(preview.Lines, "No filter is set: this includes every dead letter that is not requeued yet.")
	}
	return preview, nil
}

func (c *call) requeueLetters(filter admin.DeadFilter) (notice, error) {
	out, err := c.use.Letters.Requeue(c.ctx, filter, c.deadOptions(false), c.did)
	n := notice{
		Text:  countNoun(out.Requeued, "dead letter") + " requeued",
		Final: "The events are being sent; that is not taken back. The list shows the dead letters as requeued.",
	}
	if filter.Source == admin.FromHandler {
		n.Final = "Their handlers take the messages within a few seconds, if they run. The list shows which ones wait."
	}

	if out.Rejected > 0 {
		n.Text += ", " + formatNumber(out.Rejected) + " rejected"
		for _, w := range out.Why {
			n.Rows = append(n.Rows, row{w.ID, w.Reason})
		}
	}
	n.Text += "."
	return n, err
}

func planDiscard(call *call) (preview, error) {
	filter, err := call.selectLetters()
	if err != nil {
		return preview{}, err
	}

	out, err := call.use.Letters.Discard(call.ctx, filter, admin.DryRun, nil)
	preview := preview{
		run: func() (notice, error) {
			out, err := call.use.Letters.Discard(call.ctx, filter, admin.ForReal, call.did)
			final := "They are gone."
			if out.ArchivedUntil != nil {
				final = "They are in the archive until " + out.ArchivedUntil.Format(time.DateTime) + " UTC, where they can be requeued."
			}
			return notice{
				Text:  countNoun(out.Discarded, "dead letter") + " discarded.",
				Final: final + " The audit log shows who discarded how many, and with which filter.",
			}, err
		},
		Count:   out.Matched,
		Nothing: out.Matched == 0,
		Lines:   []string{countVerb(out.Matched, "dead letter") + " removed for good."},
		Undo: "It cannot be taken back: the dead letters and their payloads are gone, and the events were never delivered. " +
			"Download them first if they may be needed.",
	}
	switch {
	case out.ArchivedUntil != nil:
		preview.Lines = []string{countVerb(out.Matched, "dead letter") + " moved into the archive."}
		preview.Undo = "The archive keeps them until " + out.ArchivedUntil.Format(time.DateTime) + " UTC. Until then they can be requeued."
	case filter.Source == admin.FromHandler:
		preview.Undo = "It cannot be taken back: the dead letters and their messages are gone, and the handlers do not get them. " +
			"Download them first if they may be needed."
	}
	if filter.All && filter.Empty() {
		preview.Lines = append(preview.Lines, "No filter is set: this includes every dead letter of the selected state.")
	}

	// One letter was shown before, so a click is enough.
	if out.Matched > 1 {
		preview.Phrase = "discard " + strconv.FormatInt(out.Matched, 10)
	}
	return preview, err
}

// normalizeField returns the value of a text field without the characters that people do not see in it. Browsers remove the line breaks of
// these fields alone, so a comparison with a hidden field must leave them out.
func normalizeField(text string) string {
	return strings.TrimSpace(strings.NewReplacer("\r", "", "\n", "").Replace(text))
}

// parseEdit returns the letter, and the fields that the form changes.
func (c *call) parseEdit() (admin.DeadRef, admin.DeadEdit, error) {
	ref, err := c.parseLetterRef()
	if err != nil {
		return ref, admin.DeadEdit{}, err
	}
	version, err := strconv.ParseInt(c.value("version"), 10, 32)
	if err != nil {
		return ref, admin.DeadEdit{}, invalidInput("the version of the dead letter is missing")
	}

	edit := admin.DeadEdit{Version: int32(version), Fields: map[string]string{}}
	for _, f := range editable {
		if !c.q.Has("set." + f.Name) {
			continue
		}
		old, value := normalizeField(c.q.Get("was."+f.Name)), normalizeField(c.q.Get("set."+f.Name))
		switch {
		// The form shows the stored value, so an unchanged field is not an edit.
		case old == value:
		case value == "":
			edit.Unset = append(edit.Unset, f.Name)
		default:
			edit.Fields[f.Name] = value
		}
	}

	if c.isSet("replace-payload") {
		edit.PayloadAs = c.value("as")
		if edit.PayloadAs != admin.PayloadNull {
			// Browsers end the lines of a form field with CRLF.
			edit.Payload = []byte(strings.ReplaceAll(c.q.Get("payload"), "\r\n", "\n"))
		}
	}

	if c.isSet("replace-headers") {
		// A list without headers removes them, and no list keeps them.
		edit.Headers = [][2]string{}
		for _, line := range splitLines(c.q.Get("headers")) {
			name, value, ok := strings.Cut(line, ":")
			if !ok || strings.TrimSpace(name) == "" {
				return ref, edit, invalidInput("headers: %q is not name: value", line)
			}
			edit.Headers = append(edit.Headers, [2]string{strings.TrimSpace(name), strings.TrimSpace(value)})
		}
	}
	return ref, edit, nil
}

func planEdit(call *call) (preview, error) {
	ref, edit, err := call.parseEdit()
	if err != nil {
		return preview{}, err
	}

	if len(edit.Fields)+len(edit.Unset) == 0 && edit.Payload == nil && edit.PayloadAs == "" && edit.Headers == nil {
		return preview{}, invalidInput("no field is changed; change one, or use Requeue to send the event as it is")
	}
	out, err := call.use.Letters.Edit(call.ctx, ref, edit, call.deadOptions(true))
	changed := strings.Join(out.Edited, ", ")
	run := func() (notice, error) { return call.editLetter(ref, edit) }
	if ref.Source == admin.FromHandler {
		return newPreview(run, "It cannot be taken back. The dead letter stays in the list as requeued, with its original message.",
			"Message "+out.ID+" goes back to its handler at once.", "Changed: "+changed+"."), err
	}
	return newPreview(run, "It cannot be taken back: the event is sent again as delivery "+strconv.Itoa(int(out.Delivery))+
		". The dead letter stays in the list as requeued, with its original envelope.",
		"Event "+out.ID+" of "+out.Collection+" is sent at once.", "Changed: "+changed+"."), err
}

func (c *call) editLetter(ref admin.DeadRef, edit admin.DeadEdit) (notice, error) {
	out, err := c.use.Letters.Edit(c.ctx, ref, edit, c.deadOptions(false))
	text := "Event " + cmp.Or(out.ID, ref.ID) + " was requeued"
	if len(out.Edited) > 0 {
		text += "; changed: " + strings.Join(out.Edited, ", ")
	}
	final := "It is being sent; that is not taken back."
	if ref.Source == admin.FromHandler {
		text = strings.Replace(text, "Event", "Message", 1)
		final = "Its handler takes it within a few seconds, if it runs."
	}
	return notice{Text: text + ".", Final: final}, err
}
