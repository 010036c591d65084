// SPDX-License-Identifier: Apache-2.0

package install

import (
	"fmt"
	"os"
	"strings"
)

// page has the fenced blocks of a page of the documentation, in order, by the heading above them.
type page map[string][]string

func readPage(path string) (page, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	p, heading, block := page{}, "", []string(nil)
	inside := false
	for line := range strings.Lines(string(text)) {
		bare := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(bare, "```"):
			if inside {
				p[heading] = append(p[heading], strings.Join(block, ""))
			}
			inside, block = !inside, nil
		case inside:
			block = append(block, line)
		case strings.HasPrefix(line, "#"):
			heading = strings.TrimSpace(strings.TrimLeft(line, "#"))
		}
	}
	if inside {
		return nil, fmt.Errorf("%s: the last block has no end", path)
	}
	return p, nil
}
