-- Pandoc filter of `make proofs`, which makes one document of the theory pages.
-- A link stays if its page is part of the document; any other becomes its text.

local first = {}  -- the first heading of each page, by the prefix that --file-scope gives
local known = {}  -- all identifiers of headings

local function heading(one)
  local page = one.identifier:match("^(.*%.md)__")
  known[one.identifier] = true
  if page and not first[page] then first[page] = one.identifier end
end

local function link(one)
  if one.target:match("^https?:") then return one end
  local path, place = one.target:gsub("^#", ""):match("^(.-%.md)[_#]*(.*)$")
  local page = path and path:match("[%w-]+%.md$")
  if page == "cite.md" then return pandoc.Link(one.content, "#bibliography") end
  for prefix, start in pairs(first) do
    local concept = path and path:match("concepts/") and not prefix:match("concepts")
    if page and not concept and prefix:match("[%w-]+%.md$") == page then
      local target = place == "" and start or prefix .. "__" .. place
      if known[target] then return pandoc.Link(one.content, "#" .. target) end
    end
  end
  return one.content
end

-- Commands that pandoc's reader of formulas does not know.
local function math(one)
  one.text = one.text:gsub("\\thinspace", "\\,"):gsub("\\cr\n", "\\\\\n")
  return one
end

local style = [[
#show figure.where(kind: table): set block(breakable: true)
#show table.cell: set align(left)
#show table: set par(justify: false)
#show raw.where(block: true): set text(size: 0.85em)]]

local function meta(one)
  one.nocite = pandoc.Cite({ pandoc.Str("@*") }, { pandoc.Citation("*", "NormalCitation") })
  one.papersize, one.margin = "a4", { x = "2.4cm", y = "2.4cm" }
  one["header-includes"] = pandoc.RawBlock("typst", style)
  return one
end

return { { Header = heading }, { Link = link, Math = math, Meta = meta } }
