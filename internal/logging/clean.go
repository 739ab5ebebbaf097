package logging

import "strings"

// Clean is text without what an error may quote and nobody is to read: the login of every URI in it is replaced by Mask,
// and so are the documents that MongoDB's own messages hold. A refusal quotes the command with its filters, a duplicate key
// its values, and a document that fails validation the values that were looked at.
func Clean(text string) string {
	if strings.Contains(text, "://") {
		text = userInfo.ReplaceAllString(text, "${1}"+Mask+"@")
	}
	for _, q := range quotes {
		text = q.maskDocuments(text)
	}
	return text
}

// quote is the beginning of a message's document; leave is how much of it stays.
type quote struct {
	begin string
	leave int
}

var quotes = []quote{
	{begin: "to execute command {", leave: len("to execute command ")},
	{begin: "dup key: {", leave: len("dup key: ")},
	{begin: "{\"failingDocumentId\"", leave: 0},
	{begin: "{\"operatorName\"", leave: 0},
}

// maskDocuments replaces the document behind each beginning. A document without an end, as in a text that was shortened, is
// replaced to the end of the text.
func (q quote) maskDocuments(text string) string {
	for from := 0; ; {
		at := strings.Index(text[from:], q.begin)
		if at < 0 {
			return text
		}
		open := from + at + q.leave
		end := closingBrace(text, open)
		text = text[:open] + Mask + text[end:]
		from = open + len(Mask)
	}
}

// closingBrace is the place behind the brace that closes the one at open; braces in quoted strings do not count.
func closingBrace(text string, open int) int {
	depth, quoted := 0, false
	for i := open; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{':
			depth++
		case c == '}':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return len(text)
}
